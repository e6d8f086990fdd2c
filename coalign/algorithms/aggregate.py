"""Weights that turn per-token loss values into one number, with denominators that are global over an optimizer step.

A loss never divides. The framework counts tokens and sequences over all micro-batches and ranks of the step, and sums
``value * weight``. So neither the loss nor its gradient depends on how the step was split. A sequence without trained
tokens counts neither as tokens nor as a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.algorithms.segments import segment_count


@dataclass(frozen=True, slots=True)
class LossTotals:
    """The denominators of a loss: counts of one optimizer step over all micro-batches and ranks.

    ``sequences`` counts those with trained tokens.
    """

    tokens: float
    sequences: float
    groups: float


def count_trained_sequences(segment: Tensor, sequences: int) -> int:
    """The number of sequences with a trained token. ``segment`` is that of trained tokens."""
    return int((segment_count(segment, sequences) > 0).sum())


def aggregation_weights(
    segment: Tensor,
    sequences: int,
    *,
    aggregation: str,
    totals: LossTotals,
    constant_length: int | None = None,
) -> Tensor:
    """f64[T]: the weight of each trained token.

    - ``token_mean``: 1 / tokens
    - ``sequence_mean_token_mean``: 1 / (sequences · tokens of the sequence)
    - ``sequence_mean_token_sum``: 1 / sequences
    - ``constant``: 1 / (sequences · constant_length)   (Dr. GRPO, 2503.20783)

    A micro-batch holds whole sequences. Raises ValueError for another name, or for `constant` without a length.
    """
    ones = torch.ones(len(segment), dtype=torch.float64, device=segment.device)
    if aggregation == "token_mean":
        return ones / totals.tokens
    if aggregation == "sequence_mean_token_mean":
        return ones / segment_count(segment, sequences)[segment] / totals.sequences
    if aggregation == "sequence_mean_token_sum":
        return ones / totals.sequences
    if aggregation == "constant":
        if constant_length is None:
            raise ValueError("loss.aggregation is 'constant': set loss.constant_length, the token count to divide by")
        return ones / (totals.sequences * constant_length)
    raise ValueError(
        f"loss.aggregation '{aggregation}': expected token_mean, sequence_mean_token_mean, sequence_mean_token_sum "
        "or constant"
    )


def sequence_weights(segment: Tensor, sequences: int, *, totals: LossTotals) -> Tensor:
    """f64[N]: the weights of a loss with one value per sequence: the mean over sequences with trained tokens."""
    return (segment_count(segment, sequences) > 0).double() / totals.sequences


def group_weights(groups: int, *, totals: LossTotals, device: torch.device | str = "cpu") -> Tensor:
    """f64[G]: the weights of a loss with one value per group: the mean over the groups."""
    return torch.full((groups,), 1.0 / totals.groups, dtype=torch.float64, device=device)
