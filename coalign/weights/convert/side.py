"""One side of a conversion: what its files hold, as boxes of the views of Hugging Face tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from coalign.weights.checksum import tensor_bytes
from coalign.weights.shards import Box, Fetch, Move, Shape, Shard, Spec, reshard

BLOCK = 16 * 2**20  # bytes that are made at a time


class CheckpointReader(Protocol):
    """``ranks``: what each file, or each rank's file, holds. ``dtypes``: of each Hugging Face tensor, as it is stored
    here."""

    ranks: Sequence[Sequence[Shard]]
    dtypes: Mapping[str, torch.dtype]

    def fetch(self, rank: int, name: str) -> Tensor:
        """A tensor of a file, mapped into memory rather than read."""


class Scratch:
    """Memory for one tensor at a time: the next one takes its place. New memory would cost a page fault a page."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __call__(self, shape: Shape, *, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)


def made(specs: Mapping[str, Spec], shard: Shard, moves: Sequence[Move], fetch: Fetch, scratch: Scratch) -> Tensor:
    """A shard's tensor, until the next one is made; where it is one box of one tensor of a file and of its type, a view
    of that."""
    dtype = specs[shard.like].dtype
    if len(moves) == 1 and moves[0].given == tuple((0, size) for size in shard.shape):
        found = fetch(moves[0].rank, moves[0].source)[tuple(slice(*ends) for ends in moves[0].taken)]
        return found.reshape(shard.shape).to(dtype)
    return next(tensor for _, tensor in reshard(specs, [shard], {shard.name: moves}, fetch, scratch))


def bare(tensor: Tensor) -> Tensor:
    """The same bytes as a storage of their own: of a view, torch.save writes all that it is a view of."""
    return torch.from_numpy(tensor_bytes(tensor)).view(tensor.dtype).view(tensor.shape)


def blocks(shape: Shape, itemsize: int, limit: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Rows from … to …, as many at a time as fit into ``limit`` bytes, at least one."""
    rows, row = shape[0], itemsize
    for size in shape[1:]:
        row *= size
    step = max(1, limit // max(row, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def rows(shape: Shape, start: int, stop: int) -> Box:
    """The box of some rows."""
    return ((start, stop), *((0, size) for size in shape[1:]))
