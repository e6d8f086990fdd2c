"""Weights of 8 bits in blocks, each block with a scale (DeepSeek V3, arXiv 2412.19437): read, never written."""

from __future__ import annotations

import torch
from torch import Tensor

SCALES = "_scale_inv"  # what the name of the scales has behind that of the weight
BLOCK = 128  # rows and columns of a block
DTYPE = torch.bfloat16  # what they are read as


def read(name: str, weight: Tensor, scales: Tensor) -> Tensor:
    """``weight`` [R, C] float8 times ``scales`` f32[⌈R / 128⌉, ⌈C / 128⌉], multiplied in float32, as bfloat16.

    ValueError for scales of another shape.
    """
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    if tuple(scales.shape) != blocks:
        raise ValueError(
            f"'{name}{SCALES}' has the shape {list(scales.shape)}; '{name}' {list(weight.shape)} in blocks of "
            f"{BLOCK} × {BLOCK} has {list(blocks)}"
        )
    found = torch.empty(weight.shape, dtype=DTYPE)
    for block, row in enumerate(scales.float()):
        some = slice(block * BLOCK, (block + 1) * BLOCK)
        found[some] = weight[some].float() * row.repeat_interleave(BLOCK)[: weight.shape[1]]
    return found
