"""Reductions over the sequences of a packed batch.

``segment`` i64[T] says which sequence a token belongs to and never decreases; N sequences may include empty ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_count(segment: Tensor, sequences: int) -> Tensor:
    """i64[N]: entries of each sequence."""
    return torch.bincount(segment, minlength=sequences)


def segment_sum(values: Tensor, segment: Tensor, sequences: int) -> Tensor:
    """[N]: the sum of ``values`` [T] over each sequence, differentiable; 0 for a sequence without entries."""
    return values.new_zeros(sequences).index_add(0, segment, values)


def discounted_sum(values: Tensor, segment: Tensor, factor: float) -> Tensor:
    """[T]: y_t = values_t + factor * y_{t+1}, restarted at the end of each sequence.

    A doubling scan: after k rounds y_t covers 2^k entries, so a longest sequence of L entries takes log L rounds,
    without a loop over tokens.
    """
    sums, step = values.clone(), 1
    while step < len(sums):
        same = segment[step:] == segment[:-step]
        if not bool(same.any()):
            break
        sums[:-step] += torch.where(same, sums[step:] * factor**step, 0.0)
        step *= 2
    return sums
