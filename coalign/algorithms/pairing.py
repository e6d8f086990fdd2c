"""From rewards to comparisons: which responses of a group are held against which others.

Positional arguments are columns with one entry per sequence, [N]; the responses of a group stand side by side. Every
function gives the columns that the pairwise losses read, and that a response which is compared with none has not:
``preference`` f32[N], higher is better within a group, NaN for a response left out; ``margin`` f32[N], how much better
it is than the worst of its group. Equal rewards make no pair, and a group of equal rewards none at all.

A function's attribute ``compares``, where there is one, is how many responses of a group it compares at most; otherwise
these may be all.

Metrics: ``pairs/count``, ``pairs/tied`` (groups without a pair), ``pairs/margin`` (the mean difference of rewards in a
pair).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coalign.algorithms.pairs import preferred
from coalign.types import Stat, Total


def best_worst(reward: Tensor, group: Tensor) -> dict[str, Any]:
    """The best response of each group against its worst, of equals the first (2402.04792 with n = 2)."""
    number, worst, best = _ranges(reward, group)
    ends = _first(reward == best, number) | _first(reward == worst, number)
    return _comparisons(reward, number, worst, ends & (worst < best))


best_worst.compares = 2


def all_pairs(reward: Tensor, group: Tensor) -> dict[str, Any]:
    """Every response of a group against every other one with a lower reward."""
    number, worst, best = _ranges(reward, group)
    return _comparisons(reward, number, worst, worst < best)


def _ranges(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of each response's group, i64[N] from 0, and the worst and the best reward in it, [N]."""
    number = torch.unique_consecutive(group, return_inverse=True)[1]
    groups = torch.zeros(int(number.max()) + 1 if len(number) else 0)
    worst, best = (groups.scatter_reduce(0, number, reward, way, include_self=False) for way in ("amin", "amax"))
    return number, worst[number], best[number]


def _first(chosen: Tensor, number: Tensor) -> Tensor:
    """bool[N]: of the ``chosen`` responses the first in each group."""
    where = chosen.nonzero().flatten()
    fresh = torch.ones(len(where), dtype=torch.bool)
    fresh[1:] = number[where][1:] != number[where][:-1]
    return torch.zeros_like(chosen).index_fill(0, where[fresh], True)


def _comparisons(reward: Tensor, number: Tensor, worst: Tensor, compared: Tensor) -> dict[str, Any]:
    preference = torch.where(compared, reward, float("nan"))
    groups = len(number.unique())
    pairs = preferred(preference, number, groups)
    return {
        "preference": preference,
        "margin": reward - worst,
        "pairs/count": Total(float(len(pairs.winner))),
        "pairs/tied": Total(float(groups - len(number[compared].unique()))),
        "pairs/margin": Stat.of(pairs.difference(reward)),
    }
