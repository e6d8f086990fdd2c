"""Filters of groups: which groups of samples to train on. Functions of columns that return one bool per sequence.

A group is kept or dropped as a whole: one False drops all of its samples. Rollouts are filtered before advantages are
computed, so baselines are those of the kept groups.
"""

from __future__ import annotations

from torch import Tensor

from coalign.algorithms.segments import RewardGroups


def varied(reward: Tensor, group: Tensor, *, min_std: float = 0.0) -> Tensor:
    """Groups whose rewards differ: their population standard deviation is above ``min_std``. bool[N].

    DAPO's dynamic sampling (2503.14476, §3.2): if all samples earn the same, every advantage is 0 and the prompt only
    dilutes the batch. It looks at the rewards themselves, so it also works for continuous ones; ``min_std`` drops
    groups that differ by noise only.
    """
    groups = RewardGroups(reward, group)
    return groups.std(unbiased=False)[groups.member] > min_std


def solve_rate(reward: Tensor, group: Tensor, *, low: float, high: float, solved: float = 1.0) -> Tensor:
    """Groups whose share of right answers (reward >= ``solved``) is from ``low`` to ``high``, both included. bool[N].

    Raises ValueError for bounds in the wrong order.
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"filter.low is {low} and filter.high {high}; expected 0 <= low <= high <= 1")
    groups = RewardGroups(reward >= solved, group)
    share = groups.mean[groups.member]
    return (share >= low) & (share <= high)
