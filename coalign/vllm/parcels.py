"""Weights for workers in other processes of this host: a parcel after the other through the same shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from coalign.weights.entry import Entry, aligned
from coalign.weights.segment import Address, SharedMemorySegment

SIZE = 64 * 2**20  # bytes of a parcel; a larger tensor has one to itself


@dataclass(frozen=True, slots=True)
class Parcel:
    """Some weights, as far as other processes are told of them. Valid until the next parcel is made."""

    address: Address
    entries: list[Entry]

    def open(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, as views that must not be written to."""
        memory = SharedMemorySegment.open(self.address).bytes
        for entry in self.entries:
            yield entry.name, entry.tensor(memory)


class Outlet:
    """The memory that parcels are made in, taken when the first one is."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.segment: SharedMemorySegment | None = None

    def parcels(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Parcel]:
        """All of them, each as soon as it is full."""
        entries: list[Entry] = []
        filled = 0
        for name, tensor in weights:
            if entries and filled + tensor.nbytes > self.size:
                yield Parcel(self.segment.address, entries)
                entries, filled = [], 0
            if self.segment is None or tensor.nbytes > self.size:
                self.size = max(self.size, tensor.nbytes)
                self.segment = SharedMemorySegment.create(self.size)
            entry = Entry(name, tensor.dtype, tuple(tensor.shape), filled)
            entry.tensor(self.segment.bytes).copy_(tensor)
            entries.append(entry)
            filled += aligned(tensor.nbytes)
        if entries:
            yield Parcel(self.segment.address, entries)
