"""Memory that several processes of one host see.

It has no name (memfd_create): it is no file in /dev/shm, whose size containers limit to 64 MiB, and it is gone with the
last process that maps it, however that process ended. Others open it through the creator's entry in /proc, so they must
see that process: same user, same container.

Where a tensor lies in a stretch of memory that others see, too.

What a sender has written so far, in shared memory, so that readers can follow while it writes.

``header`` i64[3]: the number of the sync, the bytes of records written, the state. A record is written before it is
counted, and the data that it tells of before the record; between them the interpreter's lock changes hands, which
orders them for other cores.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from coalign.weights.sync.transport import WeightError

ALIGNED = 64  # bytes: a tensor begins at a multiple of it


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in u8[n], from byte ``offset`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def bytes(self, memory: Tensor) -> Tensor:
        """A view of its part of ``memory``."""
        return memory[self.offset : self.offset + self.size]

    def tensor(self, memory: Tensor) -> Tensor:
        """The tensor itself, a view of ``memory``: not to be written to where another process created that."""
        return self.bytes(memory).view(self.dtype).view(self.shape)


def aligned(size: int) -> int:
    """Bytes from the beginning of a tensor of ``size`` bytes to that of the next one."""
    return -(-size // ALIGNED) * ALIGNED


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


RECORDS = 256 * 2**20  # bytes of address space; memory is taken as records are written
HEADER = 64
POLL = 0.0005  # seconds


class State(IntEnum):
    OPEN = 0
    COMPLETE = 1
    BROKEN = 2


class SyncJournal:
    """Written by the process that made it with ``SyncJournal()``, read by those that open its ``address``."""

    def __init__(self, address: Address | None = None) -> None:
        self._memory = SharedMemorySegment.open(address) if address else SharedMemorySegment.create(RECORDS)
        self.address = self._memory.address
        self.header = self._memory.bytes[:24].view(torch.int64).numpy()
        self._records = memoryview(self._memory.bytes.numpy())[HEADER:]

    def begin(self, sync: int) -> None:
        """Forget all records; those that follow are of this sync, the next one."""
        self.header[2], self.header[1] = State.OPEN, 0
        self.header[0] = sync  # last: whoever sees it sees the others

    def append(self, record: Any) -> None:
        end, text = int(self.header[1]), pickle.dumps(record)
        stop = end + 8 + len(text)
        self._records[end : end + 8] = len(text).to_bytes(8, "little")
        self._records[end + 8 : stop] = text
        self.header[1] = stop

    def end(self, state: State) -> None:
        """No record of this sync follows; readers of a BROKEN one raise."""
        self.header[2] = state

    def follow(self, sync: int, timeout: float, sender: str) -> Iterator[Any]:
        """The records of a sync, from the first to the last, as they are written.

        WeightError, naming ``sender``, if it breaks off, goes on with another sync, ends, or writes nothing for
        ``timeout`` seconds.
        """
        read, last, heard = 0, None, time.monotonic()
        while True:
            begun = int(self.header[0])
            state = State(
                self.header[2]
            )  # after the number, whose state it is, and before the count, final if it ended
            if begun == sync:
                while read < int(self.header[1]):
                    size = int.from_bytes(self._records[read : read + 8], "little")
                    last = pickle.loads(self._records[read + 8 : read + 8 + size])
                    read, heard = read + 8 + size, time.monotonic()
                    yield last
                if state == State.COMPLETE:
                    return
            after = f"after '{last.name}'" if last else "before its first tensor"
            if begun > sync or (begun == sync and state == State.BROKEN):
                raise WeightError(f"{sender} broke off {after}")
            if self._memory.abandoned():
                raise WeightError(f"{sender} has ended {after}")
            if time.monotonic() - heard > timeout:
                raise WeightError(f"{sender} sent nothing for {timeout:g} s (sync.timeout) {after}")
            time.sleep(POLL)
