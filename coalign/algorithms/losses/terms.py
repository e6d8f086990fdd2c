"""What the losses of a policy share: the clipped ratio, and the terms and weights around the surrogate."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from coalign.algorithms.importance import MAX_LOG_RATIO, Level, Mode, importance_weights
from coalign.algorithms.kl import estimate_kl
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import Loss, LossInput, LossOutput, Max, Stat, Stats

Surrogate = tuple[Tensor, Tensor, Stats]  # what is differentiated and its ratio, [T] each, and statistics of them


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """e^x with x clamped to ±20, where the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_range(clip_low: float, clip_high: float) -> tuple[float, float]:
    """(1 - clip_low, 1 + clip_high). ValueError for a negative setting: the ratio 1 must lie between."""
    check_clips(clip_low, clip_high)
    return 1.0 - clip_low, 1.0 + clip_high


def check_clips(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for a negative setting."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"loss.clip_low is {clip_low} and loss.clip_high is {clip_high}: neither may be below 0")


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Stats]:
    """max(-ρA, -clip(ρ, low, high) A), and the share of values that the clip changes (`clip_fraction`)."""
    plain, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    return torch.maximum(plain, clipped), {"clip_fraction": Stat.of(clipped > plain)}


def sequence_mean(x: LossInput, values: Tensor) -> Tensor:
    """[T]: at each token the mean of ``values`` [T] over its sequence, summed in float64."""
    sums = segment_sum(values.double(), x.segment, x.sequences)
    return (sums / segment_count(x.segment, x.sequences).clamp(min=1))[x.segment].to(values)


def add_policy_terms(
    x: LossInput,
    surrogate: Tensor,
    ratio: Tensor,
    stats: Stats,
    *,
    kl_coef: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    kl_corrected: bool = False,
    entropy_coef: float = 0.0,
    measure_entropy: bool = False,
    is_level: Level = "none",
    is_mode: Mode = "truncate",
    is_low: float = 0.0,
    is_high: float = 2.0,
    drift_limit: float | None = None,
) -> LossOutput:
    """weight · surrogate + kl_coef · KL(π‖π_ref) - entropy_coef · entropy, [T], with statistics of all three.

    - ``kl_coef`` adds the divergence from the reference as a loss (2402.03300). ``kl_corrected`` multiplies it by ρ:
      the gradient of k3 is then that of KL(π‖π_ref), also off policy (2512.02556).
    - ``entropy_coef`` subtracts the entropy; ``measure_entropy`` only reports it.
    - ``is_level`` weighs the surrogate alone by π_old/π_rollout, with ``is_mode``, ``is_low`` and ``is_high`` (see
      coalign.algorithms.importance).
    - ``drift_limit`` drops tokens with A < 0 in a sequence whose mean of log π_rollout/π exceeds it: mistakes that the
      policy would hardly make any more (2512.02556).

    Reads rollout if ``is_level`` or ``drift_limit``, ref if ``kl_coef``, entropy if requested; ValueError if one is
    missing.
    """
    logprobs, old = x.require("logprobs"), x.require("old")
    stats = {**stats, "policy_gradient": Stat.of(surrogate), **_ratio_stats(x, logprobs, old, ratio)}
    if is_level != "none":
        x.require("rollout", "is_level")
    if measure_entropy:
        x.require("entropy", "measure_entropy")
    value = surrogate
    if x.rollout is not None:
        weights, weight_stats = importance_weights(
            old, x.rollout, x.segment, x.sequences, level=is_level, mode=is_mode, low=is_low, high=is_high
        )
        stats |= weight_stats
        value = surrogate * weights.to(surrogate)
    if drift_limit is not None:
        drifted = _find_drifted(x, logprobs, drift_limit)
        stats["drift_fraction"] = Stat.of(drifted)
        value = torch.where(drifted, 0.0, value)
    if kl_coef:
        kl = estimate_kl(logprobs, x.require("ref", "kl_coef"), kl_estimator)
        value = value + kl_coef * (kl * bounded_exp(logprobs - old) if kl_corrected else kl)
    if entropy_coef:
        value = value - entropy_coef * x.require("entropy", "entropy_coef")
    return LossOutput(value, stats)


def policy_loss(surrogate: Callable[..., Surrogate]) -> Loss:
    """Decorator that makes a loss of ``(x, *, settings) -> Surrogate``: adds `add_policy_terms` and its settings.

    A setting of `add_policy_terms` that the function also reads is one of its parameters, without a default.
    """
    own, shared = signature(surrogate).parameters, signature(add_policy_terms).parameters
    shared = {name: p for name, p in shared.items() if p.kind is p.KEYWORD_ONLY}
    both = {name: p.default for name, p in shared.items() if name in own}

    @wraps(surrogate)
    def loss(x: LossInput, **settings: Any) -> LossOutput:
        own_settings = both | {name: value for name, value in settings.items() if name in own or name not in shared}
        shared_settings = {name: value for name, value in settings.items() if name in shared}
        return add_policy_terms(x, *surrogate(x, **own_settings), **shared_settings)

    loss.__signature__ = Signature(list({**own, **shared}.values()))  # pyright: ignore[reportAttributeAccessIssue]
    loss.__annotations__ = get_type_hints(add_policy_terms) | get_type_hints(surrogate) | {"return": LossOutput}
    loss.needs = policy_needs  # pyright: ignore[reportAttributeAccessIssue]  (functions take attributes)
    return loss


def policy_needs(*, entropy_coef: float, measure_entropy: bool, kl_coef: float, **_: object) -> tuple[str, ...]:
    """The attribute `needs` of these losses."""
    return (*(["entropy"] if entropy_coef or measure_entropy else []), *(["ref"] if kl_coef else []))


@torch.no_grad()
def _find_drifted(x: LossInput, logprobs: Tensor, limit: float) -> Tensor:
    """bool[T]: tokens with negative advantage in sequences that have become unlikely under the policy."""
    drift = sequence_mean(x, x.require("rollout", "drift_limit") - logprobs)
    return (x.require("advantages") < 0) & (drift > limit)


@torch.no_grad()
def _ratio_stats(x: LossInput, logprobs: Tensor, old: Tensor, ratio: Tensor) -> Stats:
    """Statistics of the policy's distance from the anchor of its ratio (`approx_kl`) and from the reference."""
    stats: Stats = {
        "ratio": Stat.of(ratio),
        "approx_kl": Stat.of(estimate_kl(old, logprobs, "k3")),
        "approx_kl_k1": Stat.of(old - logprobs),
        "logprob": Stat.of(logprobs),
    }
    if x.ref is not None:
        stats["kl_ref"] = Stat.of(estimate_kl(logprobs, x.ref, "k3"))
    if x.entropy is not None:
        stats["entropy"] = Stat.of(x.entropy)
    if len(ratio):
        stats["ratio_max"] = Max(ratio.max().item())
    return stats
