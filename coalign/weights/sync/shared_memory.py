"""Transport between processes of one host, through memory that all of them map.

A sender writes each tensor once. A reader that can (``Module.adopts``) computes with it in place. Then there are two
sides, written in turn: version n + 1 goes to one while readers compute with n on the other.

Readers follow the senders' journals, so they verify while senders write; one of the readers verifies each tensor. With
``sync.verify: rotating`` all bytes are verified when a side is written for the first time and after a sync that
failed; then an eighth of every block, another eighth each time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from coalign.cluster.batch_ref import Store
from coalign.weights.sync import transport
from coalign.weights.sync.checksums import checksum_tensors, copy_tensors
from coalign.weights.sync.segment import Address, JournalState, SharedMemorySegment, SyncJournal, TensorEntry, align
from coalign.weights.sync.transport import SentWeights, StagedTransport, WeightError

if TYPE_CHECKING:
    from coalign.backends.base import Module, TrainableModule
    from coalign.backends.engines.rollout_module import RolloutModule
    from coalign.weights.sync.transport import ExportRequest, ProcessId

MIN_SEGMENT_BYTES = 16 * 2**20  # later segments are as large as all earlier ones together
MAX_SEGMENT_BYTES = 2**30


class _DeviceSegment:
    """Bytes u8[size] of a GPU's memory. One process creates it; others open its ``address`` and may only read."""

    def __init__(self, address: Any, data: Tensor) -> None:
        self.address, self.bytes = address, data

    @staticmethod
    def create(size: int, device: str) -> _DeviceSegment:
        """Raises torch.OutOfMemoryError."""
        data = torch.empty(size, dtype=torch.uint8, device=device)
        return _DeviceSegment(reduce_tensor(data), data)

    @staticmethod
    def open(address: Any) -> _DeviceSegment:
        rebuild, arguments = address
        return _DeviceSegment(address, rebuild(*arguments))


Segment = SharedMemorySegment | _DeviceSegment  # memory of one process that others can open


@dataclass(frozen=True, slots=True)
class _WrittenTensor(TensorEntry):
    """A tensor in the segment of this address, and the checksum of its bytes."""

    segment: Any
    checksum: int


class SharedMemoryTransport(StagedTransport):
    segment: ClassVar[type[Segment]] = SharedMemorySegment
    memory: ClassVar[str] = "cpu"

    def __post_init__(self) -> None:
        self.link = f"shared memory {uuid.uuid4().hex}"
        self.adopt = any(endpoint.adopts and endpoint.device.startswith(self.memory) for endpoint in self.readers)
        self.journals: list[Address] = []
        self.side = 0
        self.served = [0, 0]  # versions served by each side since a sync failed
        self.syncs = 0  # syncs so far: a version may be sent again, after a failure or a roll-back

    def close(self) -> None:
        for model in (self.source, self.target):
            model.run(transport.forget_link, self.link, fatal=False).result()

    def stage(self, version: int, changing: bool, on_sent: transport.OnSent) -> list[SentWeights]:
        if not self.journals:
            self.journals = self.source.run(_open_sender_memory, self.link, self.segment, fatal=False).result()
        self.syncs += 1
        served, self.served = self.served, [0, 0]  # until it has succeeded
        turn = served[self.side] if self.config.verify == "rotating" and served[self.side] else None
        sending = self.source.run(send, self.link, self.syncs, self.request(changing), self.side, turn, fatal=False)
        if self.in_turns:
            sending.result()
        readers = [endpoint.identity for endpoint in self.readers]
        arguments = self.segment, self.source.name, self.journals, readers, self.syncs, turn, self.config.timeout
        receiving = self.target.run(receive, self.link, *arguments, fatal=False)
        sent = transport.wait_for_both(sending, receiving, on_sent)
        total = sum(len(rank.sizes) for rank in sent)
        if any(count != total for count in receiving.result()):
            raise WeightError(f"{total} weights were sent, and the readers found {receiving.result()}")
        self.served = served
        return sent

    def install(self, version: int, sent: list[SentWeights]) -> None:
        self.target.run(install, self.link, self.syncs, version, self.adopt, fatal=False).result()
        self.served[self.side] += 1
        if self.adopt:
            self.side = 1 - self.side


# ---- in the workers


class _SenderMemory:
    """A sender's journal and segments, and where each tensor lies on each side."""

    def __init__(self, segment: type[Segment], device: str) -> None:
        self.journal = SyncJournal()
        self._create = partial(segment.create, device=device)
        self._segments: list[Segment] = []
        self._filled = 0  # bytes of the newest segment
        self._slots: tuple[dict[str, tuple[Segment, int, int]], ...] = ({}, {})

    def place(self, side: int, name: str, size: int) -> tuple[Segment, int]:
        """Return the segment and offset that a tensor keeps on a side. Raises HostMemoryFull."""
        segment, offset, previous_size = self._slots[side].get(name, (None, 0, -1))
        if segment is None or previous_size != size:
            if not self._segments or self._filled + size > len(self._segments[-1].bytes):
                allocated = sum(len(segment.bytes) for segment in self._segments)
                self._segments.append(self._create(max(size, MIN_SEGMENT_BYTES, min(allocated, MAX_SEGMENT_BYTES))))
                self._filled = 0
            segment, offset = self._segments[-1], self._filled
            self._filled += align(size)
            self._slots[side][name] = segment, offset, size
        return segment, offset


class _ReaderMemory:
    """The senders' journals and segments, which a reader has opened."""

    def __init__(self, segment: type[Segment], journals: list[Address]) -> None:
        self._open = segment.open
        self.journals = [SyncJournal(address) for address in journals]
        self.entries: list[_WrittenTensor] = []
        self.received = 0  # the last sync that arrived complete
        self._segments: dict[Any, Segment] = {}

    def memory(self, entry: _WrittenTensor) -> Tensor:
        """Return the memory u8[n] that the tensor lies in."""
        if entry.segment not in self._segments:
            self._segments[entry.segment] = self._open(entry.segment)
        return self._segments[entry.segment].bytes


def _open_sender_memory(module: Module, store: Store, link: str, segment: type[Segment]) -> Address:
    """Make this rank's memory; return the address of its journal."""
    module.links[link] = _SenderMemory(segment, module.context.device)
    return module.links[link].journal.address


def send(
    module: TrainableModule, store: Store, link: str, sync: int, request: ExportRequest, side: int, turn: int | None
) -> SentWeights:
    """Write this rank's weights, and a journal of them, to one side. ``turn``: see checksums.py."""
    memory: _SenderMemory = module.links[link]
    journal, sizes = memory.journal, {}
    journal.begin(sync)

    def jobs(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[partial[_WrittenTensor], Tensor, Tensor]]:
        for name, tensor in weights:
            sizes[name] = size = tensor.nbytes
            segment, offset = memory.place(side, name, size)
            entry = partial(_WrittenTensor, name, tensor.dtype, tuple(tensor.shape), offset, segment.address)
            yield entry, tensor, segment.bytes[offset : offset + size]

    try:
        with transport.open_export(module, request) as weights:
            for entry, checksum in copy_tensors(jobs(weights), turn):
                journal.append(entry(checksum))
    except BaseException:
        journal.end(JournalState.BROKEN)
        raise
    journal.end(JournalState.COMPLETE)
    return SentWeights(sizes)


def receive(
    module: Module,
    store: Store,
    link: str,
    segment: type[Segment],
    source: str,
    journals: list[Address],
    readers: list[ProcessId],
    sync: int,
    turn: int | None,
    timeout: float,
) -> int:
    """Follow the senders to their end; return how many weights came. Raises WeightError unless those that this reader
    verifies arrived as they were sent."""
    if link not in module.links:
        module.links[link] = _ReaderMemory(segment, journals)
    memory: _ReaderMemory = module.links[link]
    memory.entries, memory.received = [], 0
    reader = readers.index(transport.identify_process())

    def follow_share() -> Iterator[tuple[_WrittenTensor, Tensor]]:
        for rank, journal in enumerate(memory.journals):
            for entry in journal.follow(sync, timeout, f"{source}, rank {rank}"):
                memory.entries.append(entry)
                if len(memory.entries) % len(readers) == reader:
                    yield entry, entry.bytes(memory.memory(entry))

    for entry, computed in checksum_tensors(follow_share(), turn):
        transport.check_sum(entry.name, computed, entry.checksum)
    memory.received = sync
    return len(memory.entries)


def install(module: RolloutModule, store: Store, link: str, sync: int, version: int, adopt: bool) -> None:
    memory: _ReaderMemory = module.links[link]
    if memory.received != sync:
        raise WeightError(f"the weights of version {version} did not arrive complete, so they cannot be installed")
    weights = ((entry.name, entry.tensor(memory.memory(entry))) for entry in memory.entries)
    with transport.guard_installation(module, version):
        module.load_weights(weights, version=version, adopt=adopt)


class CudaIpcTransport(SharedMemoryTransport):
    """Shares GPU memory by CUDA IPC. Raises ValueError unless all ranks are on one GPU."""

    segment = _DeviceSegment
    memory = "cuda"

    def __post_init__(self) -> None:
        super().__post_init__()
        devices = sorted({endpoint.gpu or "CPU" for endpoint in [*self.senders, *self.readers]})
        if len(devices) > 1 or devices == ["CPU"]:
            raise ValueError(
                f"sync.transport: `cuda_ipc` needs {self.source.name} and {self.target.name} on one GPU; they are "
                f"on {', '.join(devices)}; use shared_memory or broadcast"
            )
