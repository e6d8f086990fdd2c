"""Memory that several processes of one host see.

It has no name (memfd_create): it is no file in /dev/shm, whose size containers limit to 64 MiB, and it is gone with the
last process that maps it, however that process ended. Others open it through the creator's entry in /proc, so they must
see that process: same user, same container.
"""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")
Address = tuple[int, int, int]  # process, file descriptor there, bytes


class NoRoom(MemoryError):
    """The host has no memory left for weights on their way."""


class SharedMemorySegment:
    """Bytes u8[size] of shared memory: ``create`` them in one process, ``open`` their ``address`` in others, which may
    only read: writing there ends a process (SIGSEGV)."""

    def __init__(self, address: Address, mapped: mmap.mmap) -> None:
        self.address = address
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    @staticmethod
    def create(size: int, device: str = "cpu") -> SharedMemorySegment:
        """Raises NoRoom if the host's memory, or the container's limit, would not hold it."""
        if size > (free := available()):
            raise NoRoom(f"shared memory for weights: {size / 2**20:,.0f} MiB wanted, {free / 2**20:,.0f} MiB are free")
        handle = os.memfd_create("coalign-weights")
        os.ftruncate(handle, size)
        return SharedMemorySegment((os.getpid(), handle, size), mmap.mmap(handle, size))

    @staticmethod
    def open(address: Address) -> SharedMemorySegment:
        """Raises OSError if the creator is gone or out of sight."""
        file = os.open(_path(address), os.O_RDONLY)
        try:
            return SharedMemorySegment(address, mmap.mmap(file, address[2], prot=mmap.PROT_READ))
        finally:
            os.close(file)

    def abandoned(self) -> bool:
        """Whether the process that created it has ended."""
        return not os.path.exists(_path(self.address))


def _path(address: Address) -> str:
    process, handle, _ = address
    return f"/proc/{process}/fd/{handle}"


def available() -> int:
    """Bytes of memory that this process may still take: the host's, or what its container leaves."""
    free, limit = psutil.virtual_memory().available, CGROUP / "memory.max"
    if not limit.is_file() or (most := limit.read_text().strip()) == "max":
        return free
    used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    files = int(used["active_file"]) + int(used["inactive_file"])  # the page cache, which gives way
    return min(free, int(most) - int((CGROUP / "memory.current").read_text()) + files)
