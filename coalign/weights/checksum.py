"""A checksum of a tensor's bytes: equal on every machine, blind to nothing but what 64 bits cannot tell apart."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor as u8[numel * itemsize], in memory of the host; a view if it lies there contiguously."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """XXH3 (64 bits) of an array's bytes."""
    return xxhash.xxh3_64_intdigest(data)
