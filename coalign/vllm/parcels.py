"""Weights for workers in other processes of this host: a parcel after the other through the same shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.weights.arena import Address, Arena

SIZE = 64 * 2**20  # bytes of a parcel; a larger tensor has one to itself
ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in the parcel."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """Some weights, as far as other processes are told of them. Valid until the next parcel is made."""

    address: Address
    entries: list[Entry]

    def open(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, as views that must not be written to."""
        arena = Arena.open(self.address)
        for entry in self.entries:
            yield entry.name, arena.tensor(entry.offset, entry.dtype, entry.shape)


class Outlet:
    """The memory that parcels are made in, taken when the first one is."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.arena: Arena | None = None

    def parcels(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Parcel]:
        """All of them, each as soon as it is full."""
        entries: list[Entry] = []
        filled = 0
        for name, tensor in weights:
            if entries and filled + tensor.nbytes > self.size:
                yield Parcel(self.arena.address, entries)
                entries, filled = [], 0
            if self.arena is None or tensor.nbytes > self.size:
                self.size = max(self.size, tensor.nbytes)
                self.arena = Arena.create(self.size)
            entry = Entry(name, tensor.dtype, tuple(tensor.shape), filled)
            self.arena.tensor(filled, entry.dtype, entry.shape).copy_(tensor)
            entries.append(entry)
            filled += -(-tensor.nbytes // ALIGNED) * ALIGNED
        if entries:
            yield Parcel(self.arena.address, entries)
