"""Memory that several processes of one host share: segments, the tensors in them, and the journal of a sync.

A segment has no name (memfd_create): it is no file in /dev/shm, whose size containers limit to 64 MiB, and it is freed
with the last process that maps it. Others open it through the creator's entry in /proc, as the same user in the same
container.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from coalign.memory import measure_free_memory
from coalign.weights.sync.transport import WeightError

ALIGNMENT = 64  # bytes: every tensor starts at a multiple of it
Address = tuple[int, int, int]  # process, file descriptor there, bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in memory u8[n], from byte ``offset`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Its number of bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def bytes(self, memory: Tensor) -> Tensor:
        """Return the bytes of the tensor in ``memory``, a view u8[size]."""
        return memory[self.offset : self.offset + self.size]

    def tensor(self, memory: Tensor) -> Tensor:
        """Return the tensor, a view of ``memory``. Do not write to it where another process created the memory."""
        return self.bytes(memory).view(self.dtype).view(self.shape)


def align(size: int) -> int:
    """Round a tensor's bytes up to where the next tensor may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[TensorEntry, Tensor]]]:
    """Yield buckets of at most ``size`` bytes, in the order of the weights; a larger tensor has one of its own."""
    bucket: list[tuple[TensorEntry, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append((TensorEntry(name, tensor.dtype, tuple(tensor.shape), filled), tensor))
        filled += align(tensor.nbytes)
    if bucket:
        yield bucket


class HostMemoryFull(MemoryError):
    """The host has no memory left for weights under way."""


class SharedMemorySegment:
    """Bytes u8[size] of shared memory. One process creates it; others open its ``address`` and may only read: writing
    ends them with SIGSEGV."""

    def __init__(self, address: Address, mapped: mmap.mmap) -> None:
        self.address = address
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    @staticmethod
    def create(size: int, device: str = "cpu") -> SharedMemorySegment:
        """Raises HostMemoryFull if the host's memory, or the container's limit, would not hold it."""
        if size > (free := measure_free_memory()):
            wanted = f"{size / 2**20:,.0f} MiB wanted, {free / 2**20:,.0f} MiB are free"
            raise HostMemoryFull(f"shared memory for weights: {wanted}")
        handle = os.memfd_create("coalign-weights")
        os.ftruncate(handle, size)
        return SharedMemorySegment((os.getpid(), handle, size), mmap.mmap(handle, size))

    @staticmethod
    def open(address: Address) -> SharedMemorySegment:
        """Raises OSError if the creator has ended or is out of sight."""
        file = os.open(_path(address), os.O_RDONLY)
        try:
            return SharedMemorySegment(address, mmap.mmap(file, address[2], prot=mmap.PROT_READ))
        finally:
            os.close(file)

    def is_abandoned(self) -> bool:
        """Whether the process that created it has ended."""
        return not os.path.exists(_path(self.address))


def _path(address: Address) -> str:
    process, handle, _ = address
    return f"/proc/{process}/fd/{handle}"


# ---- the journal

RECORDS = 256 * 2**20  # bytes of address space; memory is used as records are written
HEADER = 64  # bytes before the records
POLL = 0.0005  # seconds


class JournalState(IntEnum):
    OPEN = 0
    COMPLETE = 1
    BROKEN = 2


class SyncJournal:
    """A list of records in shared memory that others follow while its process writes it.

    ``SyncJournal()`` makes one to write; others open its ``address`` to read. The header i64[3] has the number of the
    sync, the bytes of records, and the state. A record is written before it is counted, and the data that it describes
    before the record; in between the interpreter's lock changes hands, which orders the writes for other cores.
    """

    def __init__(self, address: Address | None = None) -> None:
        self._memory = SharedMemorySegment.open(address) if address else SharedMemorySegment.create(RECORDS)
        self.address = self._memory.address
        self.header = self._memory.bytes[:24].view(torch.int64).numpy()
        self._records = self._memory.bytes.numpy().data[HEADER:]

    def begin(self, sync: int) -> None:
        """Forget all records; the next ones belong to this sync."""
        self.header[2], self.header[1] = JournalState.OPEN, 0
        self.header[0] = sync  # last: a reader that sees it sees the other two

    def append(self, record: Any) -> None:
        end, text = int(self.header[1]), pickle.dumps(record)
        stop = end + 8 + len(text)
        self._records[end : end + 8] = len(text).to_bytes(8, "little")
        self._records[end + 8 : stop] = text
        self.header[1] = stop

    def end(self, state: JournalState) -> None:
        """Let no more records follow; readers of a BROKEN sync raise."""
        self.header[2] = state

    def follow(self, sync: int, timeout: float, sender: str) -> Iterator[Any]:
        """Yield the records of a sync, from the first to the last, as they are written. Raises WeightError, naming
        ``sender``, if it breaks off, goes on with another sync, ends, or writes nothing for ``timeout`` seconds."""
        read, last, heard = 0, None, time.monotonic()
        while True:
            # The state after the number, to which it belongs, and before the count, which is final once it ended.
            current = int(self.header[0])
            state = JournalState(self.header[2])
            if current == sync:
                while read < int(self.header[1]):
                    size = int.from_bytes(self._records[read : read + 8], "little")
                    last = pickle.loads(self._records[read + 8 : read + 8 + size])
                    read, heard = read + 8 + size, time.monotonic()
                    yield last
                if state == JournalState.COMPLETE:
                    return
            after = f"after '{last.name}'" if last else "before its first tensor"
            if current > sync or (current == sync and state == JournalState.BROKEN):
                raise WeightError(f"{sender} broke off {after}")
            if self._memory.is_abandoned():
                raise WeightError(f"{sender} has ended {after}")
            if time.monotonic() - heard > timeout:
                raise WeightError(f"{sender} sent nothing for {timeout:g} s (sync.timeout) {after}")
            time.sleep(POLL)
