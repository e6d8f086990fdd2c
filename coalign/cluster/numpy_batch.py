"""A batch as numpy arrays: Ray's object store shares them, so readers map a batch instead of unpickling it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coalign.data.batch import Batch, Column


@dataclass(frozen=True, slots=True)
class NumpyColumn:
    """A column as a numpy array; a dtype that numpy lacks is stored as integers of its size."""

    array: np.ndarray
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> NumpyColumn:
        tensor = tensor.detach().cpu().contiguous()
        raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return NumpyColumn(raw.numpy(), tensor.dtype)

    def rows(self, index: np.ndarray | slice) -> Tensor:
        """Copy some rows; the copy may be written to."""
        rows = self.array[index]
        return torch.from_numpy(rows.copy() if isinstance(index, slice) else rows).view(self.dtype)


@dataclass(frozen=True, slots=True)
class NumpyBatch:
    """A Batch whose tensors are numpy arrays."""

    lengths: np.ndarray
    token: Mapping[str, NumpyColumn]
    sequence: Mapping[str, NumpyColumn | list[Any]]

    @staticmethod
    def of(batch: Batch) -> NumpyBatch:
        return NumpyBatch(
            batch.lengths.numpy(),
            {name: NumpyColumn.of(column) for name, column in batch.token.items()},
            {name: NumpyColumn.of(c) if isinstance(c, Tensor) else c for name, c in batch.sequence.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; what lists hold is not counted."""
        columns = (*self.token.values(), *self.sequence.values())
        return self.lengths.nbytes + sum(each.array.nbytes for each in columns if isinstance(each, NumpyColumn))

    def select(self, rows: np.ndarray) -> Batch:
        """Copy the sequences ``rows`` (i64), in this order."""
        lengths, ends = self.lengths[rows], self.lengths.cumsum()
        starts = ends[rows] - lengths
        # Token t comes from where its row starts, plus its distance from where the row starts in the result.
        moved = starts - lengths.cumsum() + lengths
        whole = len(rows) > 0 and bool((moved == moved[0]).all())  # one piece
        tokens = (
            slice(starts[0], starts[0] + lengths.sum()) if whole else moved.repeat(lengths) + np.arange(lengths.sum())
        )
        sequence: dict[str, Column] = {
            name: column.rows(rows) if isinstance(column, NumpyColumn) else [column[i] for i in rows]
            for name, column in self.sequence.items()
        }
        return Batch(
            torch.from_numpy(lengths), {name: column.rows(tokens) for name, column in self.token.items()}, sequence
        )


def to_numpy(value: Any) -> Any:
    """Convert a Batch into a NumpyBatch; other values are returned unchanged."""
    return NumpyBatch.of(value) if isinstance(value, Batch) else value
