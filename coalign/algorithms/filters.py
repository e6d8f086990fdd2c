"""Filters of groups: which groups of samples to train on. Functions of columns that return one bool per sequence.

A group is kept or dropped as a whole: one False drops all of its samples. Roll-outs are filtered before advantages are
computed, so baselines are those of the kept groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def varied(reward: Tensor, group: Tensor, *, min_std: float = 0.0) -> Tensor:
    """Groups whose rewards differ: their population standard deviation is above ``min_std``. bool[N].

    DAPO's dynamic sampling (2503.14476, §3.2): if all samples earn the same, every advantage is 0 and the prompt only
    dilutes the batch. It looks at the rewards themselves, so it also works for continuous ones; ``min_std`` drops
    groups that differ by noise only.
    """
    _, member, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    # Distances from the group's smallest reward: equal rewards are then exactly 0 apart, whatever their value.
    least = torch.full((len(sizes),), float("inf"), dtype=torch.float64)
    least.scatter_reduce_(0, member, reward.double(), "amin")
    distance = reward.double() - least[member]
    mean = _sums(distance, member, sizes) / sizes
    variance = _sums((distance - mean[member]) ** 2, member, sizes) / sizes
    return variance.sqrt()[member] > min_std


def solve_rate(reward: Tensor, group: Tensor, *, low: float, high: float, solved: float = 1.0) -> Tensor:
    """Groups whose share of right answers (reward >= ``solved``) is from ``low`` to ``high``, both included. bool[N].

    Raises ValueError for bounds in the wrong order.
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"filter.low is {low} and filter.high {high}; expected 0 <= low <= high <= 1")
    _, member, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    share = (_sums((reward >= solved).double(), member, sizes) / sizes)[member]
    return (share >= low) & (share <= high)


def _sums(values: Tensor, member: Tensor, sizes: Tensor) -> Tensor:
    """f64[G]: the sum of ``values`` f64[N] in each group."""
    return torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, member, values)
