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


def parcels(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Parcel]:
    """All of them, each as soon as it is full."""
    arena, entries, filled = Arena.create(SIZE), [], 0
    for name, tensor in weights:
        size = tensor.nbytes
        if entries and filled + size > arena.address[2]:
            yield Parcel(arena.address, entries)
            entries, filled = [], 0
        if size > arena.address[2]:
            arena.close()
            arena = Arena.create(size)
        arena.tensor(filled, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), filled))
        filled += -(-size // ALIGNED) * ALIGNED
    if entries:
        yield Parcel(arena.address, entries)
