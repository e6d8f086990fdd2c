"""What Coalign says of Ray without importing it: which versions it takes, who may join, where no space is left."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

LEAST_VERSION = "2.60"  # the first Ray that asks for a token by default
# Ray spills no more onto a disk of which so much is in use; the variable is Ray's.
FULL_SHARE = float(os.environ.get("RAY_local_fs_capacity_threshold", "0.95"))  # noqa: SIM112
MIB = 2**20


class RayStoreError(RuntimeError):
    """An object store of Ray is full, does not answer, or is gone. The message says what to set."""


@dataclass(frozen=True, slots=True)
class StoreSpace:
    """The object store of a node, in bytes: its size, what it has spilled, and where it spills to.

    Example: ``StoreSpace("host", 80 * MIB, 0, "/tmp/ray").can_spill(20 * MIB)`` is false if that disk is full.
    """

    node: str
    size: int
    spilled: int
    directory: str

    def count_spillable(self) -> float:
        """Bytes that Ray may still spill; infinite if this machine does not have the directory."""
        try:
            disk = shutil.disk_usage(self.directory)
        except OSError:
            return math.inf
        return max(0.0, disk.free - (1 - FULL_SHARE) * disk.total)

    def can_spill(self, payload: int) -> bool:
        """Whether Ray can spill all that the store may hold, and ``payload`` more bytes."""
        return self.count_spillable() > self.size + payload

    def describe_spilling(self) -> str:
        """Describe a store that has begun to spill."""
        return (
            f"the object store of Ray on node {self.node} ({self.size // MIB:,} MiB) has begun to spill to "
            f"{self.directory}, so batches take longer; `ray start --object-store-memory` makes it larger"
        )

    def describe(self) -> str:
        """Describe a store that is full, and what to do."""
        try:
            disk = shutil.disk_usage(self.directory)
            state = f"that disk has {disk.free // MIB:,} of {disk.total // MIB:,} MiB left"
        except OSError:
            state = "that disk has no space left"
        return (
            f"the object store of Ray on node {self.node} is full: its {self.size // MIB:,} MiB of memory are in use, "
            f"{self.spilled // MIB:,} MiB were spilled to {self.directory}, and {state} (Ray uses up to "
            f"{FULL_SHARE:.0%}). Free space there, or start Ray with more of it and set runtime.ray_address: "
            "`ray start --head --object-store-memory=BYTES --object-spilling-directory=DIRECTORY`"
        )


def check_ray() -> None:
    """Check that Ray is installed and can ask for a token. ImportError if it is missing, ValueError if it is older."""
    try:
        _check_ray_version(version("ray"))
    except PackageNotFoundError:
        raise ImportError(
            "runtime.cluster: this run needs ray (its models have several processes, or it says so), which is not "
            "installed: pip install 'coalign[ray]'"
        ) from None


def _check_ray_version(installed: str) -> None:
    """Check that Ray can ask for a token. ValueError for an older version."""
    if Version(installed) < Version(LEAST_VERSION):
        raise ValueError(
            f"runtime.cluster: ray {installed} is installed, and Coalign needs ray >= {LEAST_VERSION}, the first that "
            "asks for a token by default (docs/ports.md): pip install -U 'coalign[ray]'"
        )


def describe_open_cluster(address: str | None) -> str:
    """Describe a Ray cluster that lets in everyone (``address`` None: it was started here)."""
    which = f"at {address} " if address else "that was started here "
    fix = "with RAY_AUTH_MODE=token" if address else "without RAY_AUTH_MODE=disabled"
    return f"the Ray cluster {which}asks for no token: who reaches its ports runs code; start it {fix} (docs/ports.md)"
