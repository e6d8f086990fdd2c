"""A simulated accelerator: torch's device `standin`, four cards without hardware. `load` builds and registers it.

Its kernels are the CPU's, so results are comparable bit for bit. What differs is what differs on a real device:

- The host cannot touch its memory (SIGSEGV), and fresh memory holds NaN.
- Operations on tensors of different devices are refused, in CUDA's words.
- Streams run by themselves: whoever has not waited for another stream's work reads NaN, always (native/streams.h).
- Copies with ``non_blocking`` are made when somebody waits for them, and no sooner.
- Every card has its own random generator and a limit of memory.
- What a graph captures runs when it is replayed, and not before. It refuses what CUDA's refuses, and memory that was
  freed since. Memory that graphs share is not simulated.

It counts kernels, copies and waits; a graph is one kernel. It does not simulate speed, collectives or the choice of a
kernel.
Registering is for good, and must come before the process's first backward: so tests on it run in processes of their
own (`pytest -m device tests/standin`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

NAME = "standin"
SOURCES = Path(__file__).parent / "native"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w"]


def find_compiler() -> str | None:
    """The machine's C++ compiler; None without one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def build() -> Path:
    """Return the shared library, built if this version of the sources and of torch has not been built yet.

    It is kept in COALIGN_TESTS_CACHE (~/.cache/coalign-tests). Raises CalledProcessError with the compiler's message.
    """
    compiler = find_compiler()
    assert compiler is not None, "the caller asks find_compiler first"
    sources = sorted(SOURCES.iterdir())
    parts = [torch.__version__, sys.version, compiler, *FLAGS, *(file.read_text() for file in sources)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("COALIGN_TESTS_CACHE", Path.home() / ".cache" / "coalign-tests"))
    library = folder / f"{NAME}-{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{library}.lock"):
        if not library.exists():
            compile_library(compiler, library)
    return library


def compile_library(compiler: str, library: Path) -> None:
    """Compile the sources; takes about half a minute of a core."""
    torch_folder = Path(torch.__file__).parent
    includes = [torch_folder / "include", torch_folder / "include" / "torch" / "csrc" / "api" / "include"]
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    command = [
        *(compiler, *FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}_native"),
        *(f"-I{path}" for path in [*includes, sysconfig.get_paths()["include"]]),
        *(str(SOURCES / "device.cpp"), "-o", str(unfinished)),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed on {SOURCES}:\n{done.stderr[:5000]}")
    unfinished.rename(library)


@cache
def load() -> Any:
    """Register the device with torch, and return its native module."""
    spec = importlib.util.spec_from_file_location(f"{NAME}_native", build())
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return native


def _device_module(native: Any) -> types.ModuleType:
    """What torch asks of `torch.standin`."""
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def index(device: Any) -> int:
        given = device if isinstance(device, int) else torch.device(NAME if device is None else device).index
        return native.current_device() if given is None or given < 0 else given

    def seed_card(seed: int) -> None:
        native.generator(native.current_device()).manual_seed(seed)

    def seed_all(seed: int) -> None:
        for card in range(native.device_count()):
            native.generator(card).manual_seed(seed)

    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index(device)),
        "device": lambda device: accelerator.device_index(index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(index(device)),
        "current_stream": lambda device=None: accelerator.current_stream(index(device)),
        "stream": lambda stream: stream,  # which is a context by itself
        "Stream": torch.Stream,
        "Event": torch.Event,
        "manual_seed": seed_card,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: native.generator(index(device)).get_state(),
        "set_rng_state": lambda state, device=None: native.generator(index(device)).set_state(state),
        "_is_in_bad_fork": native.is_in_bad_fork,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "memory_allocated": lambda device=None: accelerator.memory_allocated(index(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(index(device)),
        "empty_cache": lambda: None,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


@dataclass
class Counts:
    """What the device did: kernels by name, copies, and how often the host waited for it."""

    kernels: dict[str, int] = field(default_factory=dict)
    host_to_device: int = 0
    device_to_host: int = 0
    device_to_device: int = 0
    waits: int = 0

    @property
    def launched(self) -> int:
        return sum(self.kernels.values())


def read_counts() -> Counts:
    """Everything since the device was loaded."""
    native = load()
    return Counts(native.kernel_counts(), *native.other_counts())


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts of what the device does within this context, complete at its end."""
    before, found = read_counts(), Counts()
    yield found
    after = read_counts()
    found.kernels = {
        name: number - before.kernels.get(name, 0)
        for name, number in after.kernels.items()
        if number > before.kernels.get(name, 0)
    }
    for name in ("host_to_device", "device_to_host", "device_to_device", "waits"):
        setattr(found, name, getattr(after, name) - getattr(before, name))


@contextmanager
def memory_limit(size: int, card: int = 0) -> Iterator[None]:
    """A card of ``size`` bytes within this context; more raises torch.OutOfMemoryError."""
    native = load()
    native.set_limit(card, size)
    try:
        yield
    finally:
        native.set_limit(card, 1 << 62)


def read_races() -> list[str]:
    """Work that used bytes of another stream without having waited for it, since the last call."""
    native = load()
    found = native.races()
    native.forget_races()
    return found
