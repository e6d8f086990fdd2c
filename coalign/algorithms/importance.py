"""Importance weights that correct for samples drawn from another policy than the trained one.

The sampler differs from the trainer even at equal weights (another engine, another precision), and more so when it is
some updates behind. The loss's own ratio is π/π_old, with π_old the *trainer's* policy before the first update of the
batch (the proximal policy). The weight is π_old/π_rollout, a constant. Their product is the ratio to the sampler, and
the loss clips only the first factor: the decoupled objective (2110.00641; 2505.24298).

========  ===============================================  ==========================================================
level     weight                                           properties
========  ===============================================  ==========================================================
token     w_t = π_old(t)/π_rollout(t)                      biased for sequences, low variance (truncated: TIS)
sequence  (Π w_t)^(1/L): the geometric mean, for all t     comparable between lengths; for tight bounds, like GSPO's
product   Π w_t, for all t                                 unbiased; its variance grows with the length
========  ===============================================  ==========================================================

Bounds keep the variance finite: `truncate` clamps to them (truncated importance sampling: low = 0 and high = C > 1),
`mask` sets weights outside to 0 (IcePop, 2510.18855, of tokens; at the other levels the whole sequence). Masked tokens
still count in the denominators of the loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coalign.algorithms.kl import k3
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import EffectiveSize, Max, Stat, Stats

MAX_LOG_RATIO = 20.0  # e^20: a ratio that no bounds reach and that does not overflow

Level = Literal["none", "token", "sequence", "product"]
Mode = Literal["truncate", "mask"]


@torch.no_grad()
def importance_weights(
    old: Tensor,
    rollout: Tensor,
    segment: Tensor,
    sequences: int,
    *,
    level: Level,
    mode: Mode = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Tensor, Stats]:
    """f64[T] without gradient: the weight of each trained token; 1 at level `none`.

    ``old``, ``rollout``: [T] log-probs of the trained tokens; ``segment`` i64[T] and ``sequences`` as in LossInput. A
    micro-batch holds whole sequences, so the weights do not depend on how a batch is split.

    Statistics, of tokens at the levels `none` and `token`, else of sequences: `ess` (effective sample size of the
    unbounded weights, 0 to 1), and with a level `is_weight` (mean of the bounded ones) and `is_outside` (share clamped
    or masked). ValueError for an unknown level or mode, and for bounds that exclude 1.
    """
    ratios = importance_ratios(old, rollout, segment, sequences, level="token" if level == "none" else level)
    per_sequence = level in ("sequence", "product")
    counted = ratios[segment_count(segment, sequences) > 0] if per_sequence else ratios
    stats: Stats = {"ess": EffectiveSize.of(counted)}
    if level == "none":
        return torch.ones_like(ratios), stats
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"loss.is_low is {low} and loss.is_high is {high}: the weight on policy, 1, lies between them")
    weights = bound(ratios, mode, low, high)
    stats["is_weight"] = Stat.of(bound(counted, mode, low, high))
    stats["is_outside"] = Stat.of((counted < low) | (counted > high))
    return weights[segment] if per_sequence else weights, stats


def importance_ratios(old: Tensor, rollout: Tensor, segment: Tensor, sequences: int, *, level: Level) -> Tensor:
    """f64[T] at level `token`, else f64[N]: π_old/π_rollout. Sequences without trained tokens have 1.

    The logarithm is clamped to ±20.
    """
    logs = old.double() - rollout.double()
    if level in ("sequence", "product"):
        logs = segment_sum(logs, segment, sequences)
    elif level != "token":
        raise ValueError(f"loss.is_level is '{level}': expected none, token, sequence or product")
    if level == "sequence":
        logs = logs / segment_count(segment, sequences).clamp(min=1)
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bound(ratios: Tensor, mode: Mode, low: float, high: float) -> Tensor:
    """Clamp the ratios to [low, high], or set those outside to 0; ValueError for another mode."""
    if mode == "truncate":
        return ratios.clamp(low, high)
    if mode == "mask":
        return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)
    raise ValueError(f"loss.is_mode is '{mode}': expected truncate or mask")


@torch.no_grad()
def mismatch_stats(old: Tensor, rollout: Tensor) -> Stats:
    """The trainer's distance from the sampler on the sampled tokens, both [T].

    `mismatch` and `mismatch_max`: |Δ log-prob|; `mismatch_kl`: KL(sampler ‖ trainer) by k3, nats per token; `ess`: the
    effective sample size of the tokens' ratios, from 0 to 1.
    """
    distance = (old - rollout).abs()
    ratios = (old.double() - rollout.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch": Stat.of(distance),
        "mismatch_max": Max(distance.max().item() if len(distance) else 0.0),
        "mismatch_kl": Stat.of(k3(rollout, old)),
        "ess": EffectiveSize.of(ratios),
    }
