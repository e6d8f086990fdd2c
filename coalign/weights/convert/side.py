"""One side of a conversion: what its files hold, as boxes of the views of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from coalign.weights.shards import Box, Shape, Shard

BLOCK = 32 * 2**20  # bytes that are made at a time


class Side(Protocol):
    """``ranks``: what each file, or each rank's file, holds. ``dtypes``: of each Hugging Face tensor, as it is stored
    here."""

    ranks: Sequence[Sequence[Shard]]
    dtypes: Mapping[str, torch.dtype]

    def fetch(self, rank: int, name: str) -> Tensor:
        """A tensor of a file, mapped into memory rather than read."""


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
