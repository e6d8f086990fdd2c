"""Reductions over the sequences of a packed batch and over groups of sequences, and the weights of a loss's values.

``segment`` i64[T] says which sequence a token belongs to and never decreases; N sequences may include empty ones.

The denominators of a loss are global over an optimizer step: a loss never divides. The framework counts tokens and
sequences over all micro-batches and ranks of the step, and sums ``value * weight``. So neither the loss nor its
gradient depends on how the step was split. A sequence without trained tokens counts neither as tokens nor as a
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class RewardGroups:
    """Rewards [N] by group [N], in any order: ``member`` i64[N] numbers the groups, ``size`` and ``mean`` are [G], f64.

    ``deviation`` f64[N] is the reward minus its group's mean, exactly 0 in a group of ``equal`` rewards.
    """

    def __init__(self, reward: Tensor, group: Tensor) -> None:
        rewards = reward.double()
        ids, self.member = torch.unique(group, return_inverse=True)
        self.size = segment_count(self.member, len(ids))
        extremes = rewards.new_zeros(2, len(ids))
        extremes[0].scatter_reduce_(0, self.member, rewards, "amax", include_self=False)
        extremes[1].scatter_reduce_(0, self.member, rewards, "amin", include_self=False)
        self.equal = extremes[0] == extremes[1]
        self.mean = segment_sum(rewards, self.member, len(ids)) / self.size
        # Rounding of the mean must not turn equal rewards into advantages, which a tiny std would then magnify.
        self.deviation = torch.where(self.equal[self.member], 0.0, rewards - self.mean[self.member])

    def std(self, *, unbiased: bool) -> Tensor:
        squares = segment_sum(self.deviation.square(), self.member, len(self.size))
        return (squares / (self.size - int(unbiased)).clamp(min=1)).sqrt()


@dataclass(frozen=True, slots=True)
class LossTotals:
    """The denominators of a loss: counts of one optimizer step over all micro-batches and ranks.

    ``sequences`` counts those with trained tokens; an episode of several rows is one.
    """

    tokens: float
    sequences: float
    groups: float


AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


def sequence_shares(segment: Tensor, sequences: int, episode_tokens: Tensor | None) -> Tensor:
    """f64[N]: what each sequence counts in the number of sequences: 1, and 0 without trained tokens.

    A row of an episode of several rows counts its share of the ``episode_tokens`` i[N], the episode's trained tokens.
    """
    counts = segment_count(segment, sequences)
    return (counts > 0).double() if episode_tokens is None else counts / episode_tokens.double().clamp(min=1)


def aggregation_weights(
    segment: Tensor,
    sequences: int,
    *,
    aggregation: str,
    totals: LossTotals,
    constant_length: int = 1,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """f64[T]: the weight of each trained token. A micro-batch holds whole sequences; for ``episode_tokens`` i[N] the
    sequence is the episode.

    - ``token_mean``: 1 / tokens
    - ``sequence_mean_token_mean``: 1 / (sequences · tokens of the sequence)
    - ``sequence_mean_token_sum``: 1 / sequences
    - ``constant``: 1 / (sequences · constant_length)   (Dr. GRPO, 2503.20783)
    """
    ones = torch.ones(len(segment), dtype=torch.float64, device=segment.device)
    if aggregation == "token_mean":
        return ones / totals.tokens
    if aggregation == "sequence_mean_token_mean":
        tokens = segment_count(segment, sequences) if episode_tokens is None else episode_tokens
        return ones / tokens[segment] / totals.sequences
    return ones / (totals.sequences * (constant_length if aggregation == "constant" else 1))
