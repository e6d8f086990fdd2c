"""A batch as numpy columns: what a store of other processes keeps, so that readers map it instead of unpickling it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coalign.data.batch import Batch, Column


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as numpy keeps it; dtypes that numpy lacks lie as integers of their size."""

    array: np.ndarray
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Stored:
        tensor = tensor.detach().cpu().contiguous()
        raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return Stored(raw.numpy(), tensor.dtype)

    def rows(self, index: np.ndarray | slice) -> Tensor:
        """A copy of some rows, which its owner may write to."""
        rows = self.array[index]
        return torch.from_numpy(rows.copy() if isinstance(index, slice) else rows).view(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A Batch as it lies in the object store."""

    lengths: np.ndarray
    token: Mapping[str, Stored]
    sequence: Mapping[str, Stored | list[Any]]

    @staticmethod
    def of(batch: Batch) -> StoredBatch:
        keep = lambda column: Stored.of(column) if isinstance(column, Tensor) else column  # noqa: E731
        return StoredBatch(
            batch.lengths.numpy(),
            {name: Stored.of(column) for name, column in batch.token.items()},
            {name: keep(column) for name, column in batch.sequence.items()},
        )

    def select(self, rows: np.ndarray) -> Batch:
        """Some sequences, copied."""
        lengths, ends = self.lengths[rows], self.lengths.cumsum()
        starts = ends[rows] - lengths
        # Token t comes from where its row starts, plus its distance from where the row starts in the result.
        moved = starts - lengths.cumsum() + lengths
        whole = len(rows) > 0 and bool((moved == moved[0]).all())  # one piece
        tokens = (
            slice(starts[0], starts[0] + lengths.sum()) if whole else moved.repeat(lengths) + np.arange(lengths.sum())
        )
        pick = lambda column: column.rows(rows) if isinstance(column, Stored) else [column[i] for i in rows]  # noqa: E731
        sequence: dict[str, Column] = {name: pick(column) for name, column in self.sequence.items()}
        return Batch(
            torch.from_numpy(lengths), {name: column.rows(tokens) for name, column in self.token.items()}, sequence
        )


def stored(value: Any) -> Any:
    """A value in the form in which the object store shares it without copies."""
    return StoredBatch.of(value) if isinstance(value, Batch) else value
