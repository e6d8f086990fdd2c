"""Which groups of samples are worth training on: functions of columns that return one bool per sequence.

A group stays only whole: where a filter says False of one of its samples, all of them go. Roll-outs are filtered before
advantages are taken, so baselines are those of what is trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def varied(reward: Tensor, group: Tensor, *, min_std: float = 0.0) -> Tensor:
    """Groups whose rewards differ: their population standard deviation is above ``min_std``. bool[N].

    This is DAPO's dynamic sampling (2503.14476, §3.2): where all samples earn the same, every advantage is 0 and the
    prompt only dilutes the batch. Measured on the rewards themselves, so continuous ones count; ``min_std`` takes out
    groups that differ by noise alone.
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
    """Groups whose share of right answers (reward >= ``solved``) is from ``low`` to ``high``, bounds included. bool[N].

    Raises ValueError for bounds that are out of order.
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"filter.low is {low} and filter.high {high}; expected 0 <= low <= high <= 1")
    _, member, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    share = (_sums((reward >= solved).double(), member, sizes) / sizes)[member]
    return (share >= low) & (share <= high)


def _sums(values: Tensor, member: Tensor, sizes: Tensor) -> Tensor:
    """f64[G]: the sum of ``values`` f64[N] in each group."""
    return torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, member, values)
