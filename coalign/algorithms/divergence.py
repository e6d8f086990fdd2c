"""The distance of two policies on sampled tokens: the KL divergence from a reference, and importance weights.

Estimators of KL(π‖π_ref) from the tokens that π sampled, with d = log π - log π_ref at the sampled token (Schulman,
"Approximating KL divergence", 2020). ``FixedKL`` and ``AdaptiveKL`` control the penalty's coefficient.

========  ==============  ======================================================================================
k1        d               unbiased, either sign; as a loss its gradient has zero mean on policy: for rewards only
k2        d² / 2          biased value; its gradient is that of the reverse KL on policy
k3        e^(-d) - 1 + d  unbiased, never negative, low variance; its gradient is that of the forward KL on policy
========  ==============  ======================================================================================

Importance weights correct for samples drawn from another policy than the trained one. The sampler differs from the
trainer even at equal weights (other kernels, another precision), and more so when it is some updates behind. The
loss's own ratio is π/π_old, with π_old the *trainer's* policy before the first update of the batch (the proximal
policy). The weight is π_old/π_rollout, a constant. Their product is the ratio to the sampler, and the loss clips only
the first factor: the decoupled objective (2110.00641; 2505.24298).

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

import math
from typing import Literal

import torch
from torch import Tensor

from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import EffectiveSize, Max, Stat, Stats

MAX_K3_EXPONENT = 10.0
MAX_LOG_RATIO = 20.0  # e^20: a ratio that no bounds reach and that does not overflow

Level = Literal["none", "token", "sequence", "product"]
Mode = Literal["truncate", "mask"]

__all__ = ["AdaptiveKL", "FixedKL"]  # what `kl.fn` can name


def estimate_kl(logprobs: Tensor, ref: Tensor, estimator: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """The estimator of each token, [T], in nats. Its gradient with respect to log π is 1, d or 1 - e^(-d).

    In k3, -d is clamped to at most 10 (value at most e^10 - 11, about 22015), where the gradient is 0: otherwise a
    token that the policy all but ruled out would overflow. Large positive d needs no bound: the value grows linearly.
    """
    if estimator == "k1":
        return logprobs - ref
    if estimator == "k2":
        return (logprobs - ref).square() / 2
    log_ratio = (ref - logprobs).clamp(max=MAX_K3_EXPONENT)
    return torch.expm1(log_ratio) - log_ratio


class FixedKL:
    """A constant coefficient."""

    def __init__(self, *, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, *, samples: int) -> None:
        """A constant ignores the divergence."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


class AdaptiveKL(FixedKL):
    """A coefficient that is adjusted to keep the divergence near ``target`` (1909.08593, section 2.2).

    ``target`` is in nats per response (the sum over its tokens, as in the paper and as `kl` of shape_reward).
    ``horizon`` is in samples: a divergence that is off by 20 % or more for ``horizon`` samples changes the coefficient
    by a factor of about e^±0.2.
    """

    def __init__(self, *, coef: float, target: float, horizon: int = 10_000) -> None:
        super().__init__(coef=coef)
        if target <= 0 or horizon <= 0:
            raise ValueError(f"AdaptiveKL needs target and horizon above 0, got target={target}, horizon={horizon}")
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, *, samples: int) -> None:
        """Adjust by the mean divergence ``kl`` of ``samples`` responses; ValueError if it is not finite."""
        if not math.isfinite(kl):
            raise ValueError(f"the KL divergence of this step is {kl}; the coefficient cannot follow it")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * samples / self.horizon


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
    micro-batch holds whole sequences, so the weights do not depend on how a batch is split. 1 lies in the bounds.

    Statistics, of tokens at the levels `none` and `token`, else of sequences: `ess` (effective sample size of the
    unbounded weights, 0 to 1), and with a level `is_weight` (mean of the bounded ones) and `is_outside` (share clamped
    or masked).
    """
    ratios = importance_ratios(old, rollout, segment, sequences, level="token" if level == "none" else level)
    per_sequence = level in ("sequence", "product")
    counted = ratios[segment_count(segment, sequences) > 0] if per_sequence else ratios
    stats: Stats = {"ess": EffectiveSize.of(counted)}
    if level == "none":
        return torch.ones_like(ratios), stats
    weights, counted_weights = (
        ratio.clamp(low, high) if mode == "truncate" else torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        for ratio in (ratios, counted)
    )
    stats["is_weight"] = Stat.of(counted_weights)
    stats["is_outside"] = Stat.of((counted < low) | (counted > high))
    return weights[segment] if per_sequence else weights, stats


def importance_ratios(old: Tensor, rollout: Tensor, segment: Tensor, sequences: int, *, level: Level) -> Tensor:
    """f64[T] at level `token`, else f64[N]: π_old/π_rollout, the logarithm clamped to ±20. Sequences without trained
    tokens have 1."""
    logs = old.double() - rollout.double()
    if level != "token":
        logs = segment_sum(logs, segment, sequences)
    if level == "sequence":
        logs = logs / segment_count(segment, sequences).clamp(min=1)
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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
        "mismatch_kl": Stat.of(estimate_kl(rollout, old)),
        "ess": EffectiveSize.of(ratios),
    }
