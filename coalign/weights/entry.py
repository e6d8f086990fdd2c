"""Where a tensor lies in a stretch of memory that others see, too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 64  # bytes: a tensor begins at a multiple of it


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in u8[n], from byte ``offset`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def bytes(self, memory: Tensor) -> Tensor:
        """A view of its part of ``memory``."""
        return memory[self.offset : self.offset + self.size]

    def tensor(self, memory: Tensor) -> Tensor:
        """The tensor itself, a view of ``memory``: not to be written to where another process created that."""
        return self.bytes(memory).view(self.dtype).view(self.shape)


def aligned(size: int) -> int:
    """Bytes from the beginning of a tensor of ``size`` bytes to that of the next one."""
    return -(-size // ALIGNED) * ALIGNED
