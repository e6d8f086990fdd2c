"""How many processors graders may keep busy."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def count_processors() -> int:
    """Count the processors of this process's affinity, or fewer by a container's quota (cgroup 2)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):
        group = CGROUP / MEMBERSHIP.read_text().rpartition("0::/")[2].strip()
        for folder in (group, *group.parents):
            if folder.is_relative_to(CGROUP):
                with suppress(OSError, ValueError):  # `max`: no quota
                    quota, period = (int(number) for number in (folder / "cpu.max").read_text().split())
                    count = min(count, max(1, quota // period))
    return count
