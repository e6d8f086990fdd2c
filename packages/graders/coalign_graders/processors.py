"""How many processors graders may keep busy, as coalign.processes.host counts them: graders stand without Coalign."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # quota and period, in cgroup 2 and in 1


def count_processors() -> int:
    """Count the processors of this process's affinity, or fewer by a container's quota."""
    count = count_visible_processors()
    for group in _list_groups():
        for names in QUOTA_FILES:
            with suppress(OSError, ValueError, ZeroDivisionError):  # `max` or -1: no quota
                quota, period = (int(text) for name in names for text in (group / name).read_text().split())
                count = min(count, max(1, quota // period)) if quota > 0 else count
    return count


def count_visible_processors() -> int:
    """Count the processors of this process's affinity, without regard to quotas."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _list_groups() -> Iterator[Path]:
    """Yield the directories of the control groups around this process; a container may see its own as the root."""
    yield from (CGROUP, CGROUP / "cpu")
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            root = CGROUP if number == "0" else CGROUP / "cpu"
            if number == "0" or "cpu" in controllers.split(","):
                path = root / name.lstrip("/")
                yield from (path, *(parent for parent in path.parents if parent.is_relative_to(root)))
