"""Named tensors as a few lists of bytes, each tensor with its checksum: what moves between processes.

A checksum of a tensor's bytes: equal on every machine, blind to nothing but what 64 bits cannot tell apart.

Of up to one BLOCK it is XXH3; of more, XXH3 of the blocks' checksums, so that several threads can work on one tensor.
A block in a GPU's memory has a checksum of its own kind: it stays there. A checksum that is of a ``turn`` looks at one
of SHARES shares of every block, another one each turn; without a turn at everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from coalign.weights.sync.transport import damaged

BLOCK = 16 * 2**20  # bytes
PIECE = 256 * 2**10  # bytes: what is looked at is a piece here and there, in every part of a block
SHARES = 8
STEP = 0x1E3779B97F4A7C16  # even: from one factor of a word to the next


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor as u8[numel * itemsize], in memory of the host; a view if it lies there contiguously."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """Of an array's bytes, 64 bits."""
    return combine([xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in blocks(len(data))])


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Where each block of ``size`` bytes starts and stops; an empty one has one block."""
    for start in range(0, max(size, 1), BLOCK):
        yield start, min(start + BLOCK, size)


def pieces(size: int, turn: int | None) -> Iterator[tuple[int, int]]:
    """Where what is looked at of a block of ``size`` bytes starts and stops, in order: never nothing of it."""
    if turn is None:
        yield 0, size
        return
    shares = max(1, min(SHARES, -(-size // PIECE)))
    for start in range(turn % shares * PIECE, max(size, 1), shares * PIECE):
        yield start, min(start + PIECE, size)


def block_checksum(block: Tensor, turn: int | None = None) -> int:
    """Of one block u8[n], where it lies."""
    if block.device.type != "cpu":
        return device_checksum(torch.cat([block[start:stop] for start, stop in pieces(len(block), turn)]))
    data, state = block.numpy(), xxhash.xxh3_64()
    for start, stop in pieces(len(data), turn):
        state.update(data[start:stop])
    return state.intdigest()


def device_checksum(block: Tensor) -> int:
    """Of one block u8[n] on any device: Σ word_i · m_i mod 2^64 with odd m_i, so any change of a single word shows, and
    two words that change places."""
    words = torch.nn.functional.pad(block, (0, -len(block) % 8)).view(torch.int64)
    factors = torch.arange(len(words), device=block.device) * STEP + 1
    return (int((words * factors).sum()) + len(block)) % 2**64


def combine(checksums: Sequence[int]) -> int:
    """The checksum of a tensor from those of its blocks, in order."""
    return checksums[0] if len(checksums) == 1 else xxhash.xxh3_64_intdigest(np.array(checksums, dtype="<u8"))


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
