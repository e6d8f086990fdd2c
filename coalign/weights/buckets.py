"""Named tensors as a few large blocks of bytes, each tensor with its checksum: what moves between processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalign.weights.checksum import checksum, tensor_bytes

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes; every dtype can be viewed in place


class WeightError(RuntimeError):
    """Weights that arrived are not those that were sent; names the tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in a bucket, and what its bytes must add up to."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """u8 data and the tensors in it."""

    data: np.ndarray
    entries: tuple[Entry, ...]

    def verify(self) -> None:
        """Raises WeightError naming the first tensor whose bytes are not those that were packed."""
        for entry in self.entries:
            found = checksum(self.data[entry.start : entry.stop])
            if found != entry.checksum:
                raise WeightError(
                    f"weight '{entry.name}' arrived damaged: checksum {found:016x}, sent with {entry.checksum:016x}"
                )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) as views of the data. Do not write to them: the data may be shared with other processes."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            data = torch.from_numpy(self.data)
        for entry in self.entries:
            yield entry.name, data[entry.start : entry.stop].view(entry.dtype).view(entry.shape)


def pack(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets of about ``size`` bytes (a larger tensor has one to itself), in the order of the weights."""
    waiting: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        if waiting and filled + tensor.nbytes > size:
            yield _bucket(waiting)
            waiting, filled = [], 0
        waiting.append((name, tensor))
        filled += tensor.nbytes
    if waiting:
        yield _bucket(waiting)


def _bucket(weights: list[tuple[str, Tensor]]) -> Bucket:
    ends = np.cumsum([-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, tensor in weights])
    data = np.zeros(max(int(ends[-1]), ALIGNMENT), dtype=np.uint8)  # never empty: nothing can be viewed as float32
    entries = []
    for (name, tensor), start in zip(weights, [0, *ends[:-1].tolist()], strict=True):
        raw = tensor_bytes(tensor)
        data[start : start + len(raw)] = raw
        # Of the source, not of the copy: the copy is the first thing that may go wrong.
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), start, start + len(raw), checksum(raw)))
    return Bucket(data, tuple(entries))
