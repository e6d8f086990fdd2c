"""Buckets: lists of named tensors as bytes, each with its checksum, that move between processes at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalign.weights.sync.checksums import checksum, tensor_bytes
from coalign.weights.sync.transport import check_sum


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor as ``data`` u8[n], and the checksum of it when it was packed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    checksum: int

    def verify(self) -> None:
        """Raise WeightError if the bytes are not those that were packed."""
        check_sum(self.name, checksum(self.data), self.checksum)

    def tensor(self) -> Tensor:
        """Return a view of the data. Do not write to it: other processes may share the data."""
        if not len(self.data):  # numpy has no strides for a view of nothing
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.data).view(self.dtype).view(self.shape)


Bucket = list[PackedTensor]


def pack(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Yield buckets of at most ``size`` bytes, in the order of the weights; a larger tensor has one of its own.

    Tensors on the host are not copied: a bucket shows later changes until it is stored.
    """
    bucket: Bucket = []
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        data = tensor_bytes(tensor)
        bucket.append(PackedTensor(name, tensor.dtype, tuple(tensor.shape), data, checksum(data)))
        filled += len(data)
    if bucket:
        yield bucket
