"""Named tensors as a few lists of bytes, each tensor with its checksum: what moves between processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalign.weights.checksum import checksum, tensor_bytes
from coalign.weights.transport import damaged


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor as u8 data, and what the data must add up to."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    checksum: int

    def verify(self) -> None:
        """Raises WeightError if the bytes are not those that were packed."""
        found = checksum(self.data)
        if found != self.checksum:
            raise damaged(self.name, found, self.checksum)

    def tensor(self) -> Tensor:
        """A view of the data. Do not write to it: the data may be shared with other processes."""
        if not len(self.data):  # numpy has no strides to view nothing with
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.data).view(self.dtype).view(self.shape)


Bucket = list[PackedTensor]


def pack(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Buckets of at most ``size`` bytes (a larger tensor has one to itself), in the order of the weights.

    Tensors on the host are not copied: a bucket shows later changes until a store has taken it.
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
