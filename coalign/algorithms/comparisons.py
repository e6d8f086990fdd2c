"""Comparisons of the responses of a group: from rewards to preferences, and from preferences to pairs.

The functions that a configuration names (`pairs`) take columns [N], with the responses of a group side by side. They
return the columns that the pairwise losses read: ``preference`` f32[N], higher is better within a group, NaN for a
response that is not compared; ``margin`` f32[N], how much better it is than the worst of its group. Equal rewards make
no pair. Their attribute ``compares``, if any, is how many responses of a group they compare at most.

Metrics: ``pairs/count``, ``pairs/tied`` (groups without a pair), ``pairs/margin`` (mean reward difference of a pair).

A group of n responses with different preferences has n(n - 1)/2 pairs, so chosen / rejected data and rankings of k
responses (2203.02155, section 3.5) are one case. At the end: functions of pairs that the preference losses share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import LossInput, LossOutput, Stat, Stats, Total

__all__ = ["all_pairs", "best_worst"]  # what `pairs.fn` can name


def best_worst(reward: Tensor, group: Tensor) -> dict[str, Any]:
    """The best response of each group against its worst, the first of equal ones (2402.04792 with n = 2)."""
    number, worst, best = _ranges(reward, group)
    ends = _first(reward == best, number) | _first(reward == worst, number)
    return _comparisons(reward, number, worst, ends & (worst < best))


best_worst.compares = 2


def all_pairs(reward: Tensor, group: Tensor) -> dict[str, Any]:
    """Every response of a group against every other one with a lower reward."""
    number, worst, best = _ranges(reward, group)
    return _comparisons(reward, number, worst, worst < best)


def _ranges(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The number of each response's group, i64[N] from 0, and the worst and best reward in it, [N]."""
    number = torch.unique_consecutive(group, return_inverse=True)[1]
    groups = torch.zeros(int(number.max()) + 1 if len(number) else 0)
    worst, best = (groups.scatter_reduce(0, number, reward, way, include_self=False) for way in ("amin", "amax"))
    return number, worst[number], best[number]


def _first(chosen: Tensor, number: Tensor) -> Tensor:
    """bool[N]: the first of the ``chosen`` responses in each group."""
    rows = chosen.nonzero().flatten()
    is_first = torch.ones(len(rows), dtype=torch.bool)
    is_first[1:] = number[rows][1:] != number[rows][:-1]
    return torch.zeros_like(chosen).index_fill(0, rows[is_first], True)


def _comparisons(reward: Tensor, number: Tensor, worst: Tensor, compared: Tensor) -> dict[str, Any]:
    preference = torch.where(compared, reward, float("nan"))
    groups = len(number.unique())
    pairs = _build_pairs(preference, number, groups)
    return {
        "preference": preference,
        "margin": reward - worst,
        "pairs/count": Total(float(len(pairs.winner))),
        "pairs/tied": Total(float(groups - len(number[compared].unique()))),
        "pairs/margin": Stat.of(pairs.difference(reward)),
    }


@dataclass(frozen=True, slots=True)
class PreferencePairs:
    """P pairs: sequence ``winner[p]`` is preferred to ``loser[p]`` of the same group ``group[p]``, 0..groups-1."""

    winner: Tensor  # i64[P]
    loser: Tensor  # i64[P]
    group: Tensor  # i64[P], never decreasing
    groups: int

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values`` [N] of the winners and of the losers, [P] each."""
        return values[self.winner], values[self.loser]

    def difference(self, values: Tensor) -> Tensor:
        """[P]: the winner's ``values`` [N] minus the loser's."""
        return values[self.winner] - values[self.loser]

    def mean(self, values: Tensor) -> Tensor:
        """[G]: the mean of ``values`` [P] over the pairs of each group; 0 for a group without pairs."""
        return segment_sum(values, self.group, self.groups) / segment_count(self.group, self.groups).clamp(min=1)


def _build_pairs(preference: Tensor, group: Tensor, groups: int) -> PreferencePairs:
    """Every pair (i, j) of one group with ``preference[i] > preference[j]``; both [N], ``group`` never decreasing. Work
    and memory grow with the sum of the squared group sizes."""
    sizes = segment_count(group, groups)
    partners = sizes[group]
    first = torch.arange(len(group), device=group.device).repeat_interleave(partners)
    position = torch.arange(len(first), device=group.device) - (partners.cumsum(0) - partners)[first]
    second = (sizes.cumsum(0) - sizes)[group[first]] + position
    better = preference[first] > preference[second]
    winner = first[better]
    return PreferencePairs(winner, second[better], group[winner], groups)


def read_pairs(x: LossInput) -> PreferencePairs:
    """The pairs of a micro-batch, from its column `preference`; ValueError if it is missing."""
    return _build_pairs(x.require_column("preference"), x.require("group"), x.groups)


# Sums over a response, and all that follows, run in float64: N numbers cost nothing, and a log-ratio is a small
# difference of large sums.


def response_logprobs(x: LossInput) -> Tensor:
    """f64[N]: log π(response | prompt), summed over the trained tokens."""
    return segment_sum(x.require("logprobs").double(), x.segment, x.sequences)


def log_ratios(x: LossInput) -> Tensor:
    """f64[N]: log π - log π_ref of each response, summed over the trained tokens."""
    return segment_sum(token_log_ratios(x), x.segment, x.sequences)


def token_log_ratios(x: LossInput) -> Tensor:
    """f64[T]: log π - log π_ref."""
    return x.require("logprobs").double() - x.require("ref").double()


def lengths(x: LossInput) -> Tensor:
    """f64[N]: trained tokens of each response, at least 1, for divisions."""
    return segment_count(x.segment, x.sequences).clamp(min=1).double()


def logistic(z: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - ε) log σ(z) - ε log σ(-z), for labels that are wrong with probability ε."""
    loss = F.softplus(-z)
    return loss if label_smoothing == 0 else (1 - label_smoothing) * loss + label_smoothing * F.softplus(z)


def check_smoothing(label_smoothing: float, *, least: float = 0.0) -> None:
    """Raise ValueError unless it is a probability from ``least`` to below one half."""
    if not least <= label_smoothing < 0.5:
        what = f"the share of wrong labels, from {least} to below 0.5"
        raise ValueError(f"loss.label_smoothing is {label_smoothing}: it is {what}")


def compare_responses(
    x: LossInput, pairs: PreferencePairs, losses: Tensor, rewards: Tensor, nll_coef: float = 0.0
) -> LossOutput:
    """One value per group: the mean of ``losses`` [P] over its pairs, with statistics of the implicit ``rewards`` [N].

    ``nll_coef`` adds that much of the winner's negative log-likelihood, the mean over its own tokens (RPO, 2404.19733).
    """
    logprobs = response_logprobs(x)
    stats = {**reward_stats(pairs, rewards.detach()), **_chosen_rejected("logps", pairs, logprobs.detach())}
    if nll_coef:
        nll = -(logprobs / lengths(x))[pairs.winner]
        losses = losses + nll_coef * nll
        stats["nll"] = Stat.of(nll)
    return LossOutput(pairs.mean(losses), stats)


def reward_stats(pairs: PreferencePairs, rewards: Tensor) -> Stats:
    """Means over pairs. ``accuracy`` is the share of pairs in which the winner has the greater reward. A tie counts
    half, so a policy equal to its reference is at chance."""
    margin = pairs.difference(rewards)
    means = _chosen_rejected("rewards", pairs, rewards)
    return means | {"accuracy": accuracy(margin), "margin": Stat.of(margin)}


def accuracy(margin: Tensor) -> Stat:
    """The share of ``margin`` above 0; 0 itself counts half."""
    return Stat.of(torch.heaviside(margin, margin.new_tensor(0.5)))


def _chosen_rejected(name: str, pairs: PreferencePairs, values: Tensor) -> Stats:
    """The means of ``values`` [N] over winners and over losers."""
    winner, loser = pairs.split(values)
    return {f"{name}/chosen": Stat.of(winner), f"{name}/rejected": Stat.of(loser)}
