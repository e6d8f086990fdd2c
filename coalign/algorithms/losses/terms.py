"""What the losses of a policy share: the ratio, its clipping, and everything that surrounds the surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from coalign.algorithms.importance import MAX_LOG_RATIO, Level, Mode, importance_weights, mismatch_stats
from coalign.algorithms.kl import estimate_kl
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Max, Stat, Stats


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """e^x with x held within ±20, where the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_range(clip_low: float, clip_high: float) -> tuple[float, float]:
    """(1 - clip_low, 1 + clip_high), of ratios. ValueError for a negative one: the ratio 1 lies between."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"loss.clip_low is {clip_low} and loss.clip_high is {clip_high}: neither may be below 0")
    return 1.0 - clip_low, 1.0 + clip_high


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Stats]:
    """max(-ρA, -clip(ρ, low, high) A), and the share of values where the clip holds back (`clip_fraction`)."""
    plain, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    return torch.maximum(plain, clipped), {"clip_fraction": Stat.of(clipped > plain)}


def sequence_mean(x: LossInput, values: Tensor) -> Tensor:
    """[T]: at each token the mean of ``values`` [T] over its sequence, summed in float64."""
    sums = segment_sum(values.double(), x.segment, x.sequences)
    return (sums / segment_count(x.segment, x.sequences).clamp(min=1))[x.segment].to(values)


def policy_loss(
    x: LossInput,
    surrogate: Tensor,
    ratio: Tensor,
    stats: Stats,
    *,
    kl_coef: float,
    kl_estimator: str,
    kl_corrected: bool,
    entropy_coef: float,
    is_level: Level,
    is_mode: Mode,
    is_low: float,
    is_high: float,
    drift_limit: float | None,
) -> LossOutput:
    """weight · surrogate + kl_coef · KL(π‖π_ref) - entropy_coef · entropy, [T], with the statistics of all three.

    ``surrogate`` and ``ratio`` are [T]; the other settings are described in policy_gradient. The weights that correct
    for the sampler are on the surrogate alone.
    """
    stats = {**stats, "policy_gradient": Stat.of(surrogate), **_ratio_stats(x, ratio)}
    if is_level != "none":
        read(x, "rollout", "is_level")
    value = surrogate
    if x.rollout is not None:
        weights, seen = importance_weights(
            x.old, x.rollout, x.segment, x.sequences, level=is_level, mode=is_mode, low=is_low, high=is_high
        )
        stats |= seen | mismatch_stats(x.old, x.rollout)
        value = surrogate * weights.to(surrogate)
    if drift_limit is not None:
        gone = _drifted(x, drift_limit)
        stats["drift_fraction"] = Stat.of(gone)
        value = torch.where(gone, 0.0, value)
    if kl_coef:
        kl = estimate_kl(x.logprobs, read(x, "ref", "kl_coef"), kl_estimator)
        value = value + kl_coef * (kl * bounded_exp(x.logprobs - x.old) if kl_corrected else kl)
    if entropy_coef:
        value = value - entropy_coef * read(x, "entropy", "entropy_coef")
    return LossOutput(value, stats)


def policy_needs(*, entropy_coef: float, measure_entropy: bool, kl_coef: float, **_: object) -> tuple[str, ...]:
    """The attribute `needs` of these losses."""
    return (*(["entropy"] if entropy_coef or measure_entropy else []), *(["ref"] if kl_coef else []))


@torch.no_grad()
def _drifted(x: LossInput, limit: float) -> Tensor:
    """bool[T]: tokens to be learned from as mistakes in sequences that the policy has moved away from."""
    drift = sequence_mean(x, read(x, "rollout", "drift_limit") - x.logprobs)
    return (x.advantages < 0) & (drift > limit)


@torch.no_grad()
def _ratio_stats(x: LossInput, ratio: Tensor) -> Stats:
    """How far the policy is from the anchor of its ratio (`approx_kl`) and from the reference."""
    stats: Stats = {
        "ratio": Stat.of(ratio),
        "approx_kl": Stat.of(estimate_kl(x.old, x.logprobs, "k3")),
        "approx_kl_k1": Stat.of(x.old - x.logprobs),
        "logprob": Stat.of(x.logprobs),
    }
    if x.ref is not None:
        stats["kl_ref"] = Stat.of(estimate_kl(x.logprobs, x.ref, "k3"))
    if x.entropy is not None:
        stats["entropy"] = Stat.of(x.entropy)
    if len(ratio):
        stats["ratio_max"] = Max(ratio.max().item())
    return stats
