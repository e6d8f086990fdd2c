"""What this process may use of its machine: processors and memory, as its affinity and control groups limit them, and a
compiler.

It imports no package, because the environment of OpenMP must be set before torch is loaded.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Turns of a thread's loop before it sleeps, some 50 µs; by default 300,000. Threads that spin while others have no core
# cost six times the processor on a machine with other work, and nothing where it is idle (docs/lab.md).
SPINS = "10000"
COMPILERS = ("g++", "c++")  # the first that is there, if CXX is not set; what clang makes needs another OpenMP library
# They restrict the instructions that torch uses.
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def count_processors() -> int:
    """Count the processors that this process may keep busy: those of its affinity, or fewer by a container's quota.

    A quota of 2.5 processors counts as 2: a third thread would wait for the next period, and the others for it.
    """
    return min(count_visible_processors(), *(max(1, int(quota)) for quota in _list_quotas()), 1 << 20)


def count_visible_processors() -> int:
    """Count the processors of this process's affinity, without regard to quotas."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def list_memory_limits() -> list[int]:
    """List the limits of memory, in bytes, of the control groups around this process."""
    limits = []
    for group in _list_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # `max`: no limit
                limits.append(int((group / name).read_text()))
    return limits


def prepare_threads(environment: MutableMapping[str, str]) -> None:
    """Set how OpenMP's threads wait, and how many there are under a quota, unless a person has set it."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
        environment.setdefault("KMP_BLOCKTIME", "1")  # ms; LLVM's and Intel's
    if (processors := count_processors()) < count_visible_processors():
        environment.setdefault("OMP_NUM_THREADS", str(processors))


def _list_quotas() -> Iterator[float]:
    """Yield the quotas of the control groups around this process, in processors."""
    for group in _list_groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # `max`: no quota
            quota, period = (int(number) for number in (group / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota = int((group / "cpu.cfs_quota_us").read_text())
            if quota > 0:  # -1: no quota
                yield quota / int((group / "cpu.cfs_period_us").read_text())


def _list_groups(controller: str) -> list[Path]:
    """List the directories of the control groups around this process, of both versions of the interface.

    A container may see its group as the root, so that the roots count, too.
    """
    groups = [CGROUP, CGROUP / controller]
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            root = CGROUP if number == "0" else CGROUP / controller
            if number == "0" or controller in controllers.split(","):
                path = root / name.lstrip("/")
                groups += [path, *(parent for parent in path.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(groups))


@cache
def describe_processor() -> tuple[str, ...]:
    """What decides how this machine's kernels compute: its processor, and variables that restrict torch's."""
    variables = [f"{name}={os.environ.get(name)}" for name in VARIABLES]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor(), *variables
    keys = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return *sorted({line for line in lines if line.partition("\t")[0].strip() in keys}), *variables


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler: CXX, or the first one on the path."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    return next(([found] for name in COMPILERS if (found := shutil.which(name))), None)
