"""Transport between processes of one host, through memory that all of them map.

A sender writes each tensor once; every reader on the host finds it there, and a reader that can (``Module.adopts``)
computes with it in place. Then two sides are written in turn: version n + 1 goes to one while readers compute with n on
the other. What training does not change is written once, and has one place. Readers follow the sender's journal and
verify while it writes; each tensor is verified once on the host, by one of the readers. With ``sync.verify: rotating``
all of it when a side is written for the first time, and after a sync that did not arrive; then an eighth of every
block, another one each time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from coalign.weights.sync.copying import checked, copied
from coalign.weights.sync.segment import Address, SharedMemorySegment, State, SyncJournal, TensorEntry, aligned
from coalign.weights.sync.transport import (
    ExportRequest,
    Identity,
    Sent,
    Staged,
    SyncedModel,
    WeightEndpoint,
    WeightError,
    both,
    damaged,
    exported,
    identity,
    installing,
)

SMALLEST = 16 * 2**20  # bytes of the first segment; later ones are as large as all before them together
LARGEST = 2**30


@dataclass(frozen=True, slots=True)
class Written(TensorEntry):
    """A tensor in a segment, and what its bytes must add up to."""

    segment: Any  # its address
    checksum: int


class SharedMemory(Staged):
    """``senders`` and ``readers``: where the ranks of the two models are."""

    segment: type = SharedMemorySegment
    memory = "cpu"

    def __init__(
        self,
        source: SyncedModel,
        target: SyncedModel,
        config: Any,
        senders: list[WeightEndpoint],
        readers: list[WeightEndpoint],
    ) -> None:
        super().__init__(source, target, config)
        self.link = f"shared memory {uuid.uuid4().hex}"
        self.adopt = any(place.adopts and place.device.startswith(self.memory) for place in readers)
        self.readers = [place.identity for place in readers]
        self.journals: list[Address] = []
        self.side = 0
        self.served = [0, 0]  # versions of each side since a sync did not arrive
        self.syncs = 0  # tried so far: a version may come again, after a failure or a roll-back

    def stage(self, version: int, changing: bool) -> list[Sent]:
        if not self.journals:
            self.journals = self.source.run(open_outlet, self.link, self.segment, fatal=False).result()
        self.syncs += 1
        served, self.served = self.served, [0, 0]  # until it has gone well
        turn = served[self.side] if self.config.verify == "rotating" and served[self.side] else None
        sending = self.source.run(send, self.link, self.syncs, self.wanted(changing), self.side, turn, fatal=False)
        if self.in_turns:
            sending.result()
        arguments = self.segment, self.source.name, self.journals, self.readers, self.syncs, turn, self.config.timeout
        receiving = self.target.run(receive, self.link, *arguments, fatal=False)
        sent = both(sending, receiving)
        total = sum(len(part.sizes) for part in sent)
        if any(count != total for count in receiving.result()):
            raise WeightError(f"{total} weights were sent, and the readers found {receiving.result()}")
        self.served = served
        return sent

    def install(self, version: int, sent: list[Sent]) -> None:
        self.target.run(install, self.link, self.syncs, version, self.adopt, fatal=False).result()
        self.served[self.side] += 1
        if self.adopt:
            self.side = 1 - self.side


# ---- in the workers


class SenderMemory:
    """A sender's memory: its journal, and for each side where each tensor lies."""

    def __init__(self, segment: type, device: str) -> None:
        self.journal = SyncJournal()
        self._create = partial(segment.create, device=device)
        self._segments: list[Any] = []
        self._filled = 0  # of the newest segment
        self._places: tuple[dict[str, tuple[Any, int, int]], ...] = ({}, {})

    def place(self, side: int, name: str, size: int) -> tuple[Any, int]:
        """The tensor's own place on a side. Raises NoRoom."""
        segment, offset, had = self._places[side].get(name, (None, 0, -1))
        if segment is None or had != size:
            segment, offset = self._new(size)
            self._places[side][name] = segment, offset, size
        return segment, offset

    def _new(self, size: int) -> tuple[Any, int]:
        if not self._segments or self._filled + size > len(self._segments[-1].bytes):
            before = sum(len(segment.bytes) for segment in self._segments)
            self._segments.append(self._create(max(size, SMALLEST, min(before, LARGEST))))
            self._filled = 0
        offset = self._filled
        self._filled += aligned(size)
        return self._segments[-1], offset


class ReaderMemory:
    """What a reader knows of the senders' memory."""

    def __init__(self, segment: type, journals: list[Address]) -> None:
        self._open = segment.open
        self.journals = [SyncJournal(address) for address in journals]
        self.entries: list[Written] = []
        self.received = 0  # the last sync that arrived whole
        self._segments: dict[Any, Any] = {}

    def memory(self, entry: Written) -> Tensor:
        """u8[n] that the tensor lies in."""
        if entry.segment not in self._segments:
            self._segments[entry.segment] = self._open(entry.segment)
        return self._segments[entry.segment].bytes


def open_outlet(module: Any, store: Any, link: str, segment: type) -> Address:
    """Where to find this rank's journal."""
    module.links[link] = SenderMemory(segment, module.context.device)
    return module.links[link].journal.address


def send(module: Any, store: Any, link: str, sync: int, wanted: ExportRequest, side: int, turn: int | None) -> Sent:
    """Write this rank's weights to one side, and the journal of it. ``turn``: of the checksums."""
    outlet: SenderMemory = module.links[link]
    journal, sizes = outlet.journal, {}
    journal.begin(sync)

    def jobs(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Any, Tensor, Tensor]]:
        for name, tensor in weights:
            sizes[name] = size = tensor.nbytes
            segment, offset = outlet.place(side, name, size)
            place = name, tensor.dtype, tuple(tensor.shape), offset, segment.address
            yield place, tensor, segment.bytes[offset : offset + size]

    try:
        with exported(module, wanted) as weights:
            for place, checksum in copied(jobs(weights), turn):
                journal.append(Written(*place, checksum))
    except BaseException:
        journal.end(State.BROKEN)
        raise
    journal.end(State.COMPLETE)
    return Sent(sizes)


def receive(
    module: Any,
    store: Any,
    link: str,
    segment: type,
    source: str,
    journals: list[Address],
    readers: list[Identity],
    sync: int,
    turn: int | None,
    timeout: float,
) -> int:
    """Follow the senders to their end: how many weights came. WeightError unless they arrived as they were sent."""
    if link not in module.links:
        module.links[link] = ReaderMemory(segment, journals)
    inlet: ReaderMemory = module.links[link]
    inlet.entries, inlet.received = [], 0

    def mine() -> Iterator[tuple[Written, Tensor]]:
        for rank, journal in enumerate(inlet.journals):
            for entry in journal.follow(sync, timeout, f"{source}, rank {rank}"):
                inlet.entries.append(entry)
                if len(inlet.entries) % len(readers) == readers.index(identity()):
                    yield entry, entry.bytes(inlet.memory(entry))

    for entry, found in checked(mine(), turn):
        if found != entry.checksum:
            raise damaged(entry.name, found, entry.checksum)
    inlet.received = sync
    return len(inlet.entries)


def install(module: Any, store: Any, link: str, sync: int, version: int, adopt: bool) -> None:
    """Serve what was received."""
    inlet: ReaderMemory = module.links[link]
    if inlet.received != sync:
        raise WeightError(f"the weights of version {version} did not arrive whole, so they cannot be installed")
    weights = ((entry.name, entry.tensor(inlet.memory(entry))) for entry in inlet.entries)
    with installing(module, version):
        module.load_weights(weights, version=version, adopt=adopt)
