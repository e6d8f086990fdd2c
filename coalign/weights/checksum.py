"""A checksum of a tensor's bytes: equal on every machine, blind to nothing but what 64 bits cannot tell apart.

Of up to one BLOCK it is XXH3; of more, XXH3 of the blocks' checksums, so that several threads can work on one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

BLOCK = 8 * 2**20  # bytes


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor as u8[numel * itemsize], in memory of the host; a view if it lies there contiguously."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """Of an array's bytes, 64 bits."""
    return combine([block_checksum(data[start:stop]) for start, stop in blocks(len(data))])


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Where each block of ``size`` bytes starts and stops; an empty one has one block."""
    for start in range(0, max(size, 1), BLOCK):
        yield start, min(start + BLOCK, size)


def block_checksum(block: np.ndarray) -> int:
    """Of one block alone."""
    return xxhash.xxh3_64_intdigest(block)


def combine(checksums: Sequence[int]) -> int:
    """The checksum of a tensor from those of its blocks, in order."""
    return checksums[0] if len(checksums) == 1 else xxhash.xxh3_64_intdigest(np.array(checksums, dtype="<u8"))
