"""What a sender has written so far, in shared memory, so that readers can follow while it writes.

``header`` i64[3]: the number of the sync, the bytes of records written, the state. A record is written before it is
counted, and the data that it tells of before the record; between them the interpreter's lock changes hands, which
orders them for other cores.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch

from coalign.weights.segment import Address, SharedMemorySegment
from coalign.weights.transport import WeightError

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
