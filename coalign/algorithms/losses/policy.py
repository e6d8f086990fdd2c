"""The clipped policy gradient and its settings."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from coalign.algorithms.kl import estimate_kl
from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Max, Stat, Stats

MAX_LOG_RATIO = 20.0  # e^20: a ratio that no clip range reaches and that does not overflow


def policy_gradient(
    x: LossInput,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """The clipped surrogate of PPO (1707.06347), per token, with the settings of its descendants.

    max(-ρA, -clip(ρ, 1 - clip_low, 1 + clip_high) A), with ρ = π/π_old; DAPO (2503.14476) raises ``clip_high``.
    ``dual_clip`` c > 1 bounds it by -cA where A < 0 (1912.09729). ``kl_coef`` adds the divergence from the reference as
    a loss (2402.03300), ``entropy_coef`` subtracts the entropy. log ρ is held within ±20, where the gradient is 0.

    Reads logprobs, old, advantages; ref if ``kl_coef``, entropy if ``entropy_coef``; ValueError if one is missing.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(
            f"loss.dual_clip is {dual_clip}: it bounds the ratio from above and must exceed 1 (3 is usual)"
        )
    logprobs, old, advantages = (read(x, name) for name in ("logprobs", "old", "advantages"))
    ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate = torch.maximum(plain, clipped)
    stats = {"clip_fraction": Stat.of(clipped > plain), **_ratio_stats(x, ratio)}
    if dual_clip is not None:
        bound = -dual_clip * advantages
        too_far = (advantages < 0) & (surrogate > bound)
        surrogate = torch.where(too_far, bound, surrogate)
        stats["dual_clip_fraction"] = Stat.of(too_far)
    stats["policy_gradient"] = Stat.of(surrogate)
    value = surrogate
    if kl_coef:
        value = value + kl_coef * estimate_kl(logprobs, read(x, "ref", "kl_coef"), kl_estimator)
    if entropy_coef:
        value = value - entropy_coef * read(x, "entropy", "entropy_coef")
    return LossOutput(value, stats)


policy_gradient.needs = lambda *, entropy_coef, kl_coef, **_: (
    *(["entropy"] if entropy_coef else []),
    *(["ref"] if kl_coef else []),
)


@torch.no_grad()
def _ratio_stats(x: LossInput, ratio: Tensor) -> Stats:
    """How far the policy is from the one that sampled (`mismatch`), from the anchor (`approx_kl`) and the reference."""
    log_ratio = x.logprobs - x.old
    stats: Stats = {
        "ratio": Stat.of(ratio),
        "approx_kl": Stat.of(estimate_kl(x.old, x.logprobs, "k3")),
        "approx_kl_k1": Stat.of(-log_ratio),
        "logprob": Stat.of(x.logprobs),
    }
    if x.ref is not None:
        stats["kl_ref"] = Stat.of(estimate_kl(x.logprobs, x.ref, "k3"))
    if x.entropy is not None:
        stats["entropy"] = Stat.of(x.entropy)
    if len(ratio):
        stats["ratio_max"] = Max(ratio.max().item())
    if x.rollout is not None:
        mismatch = (x.old - x.rollout).abs()
        stats["mismatch"] = Stat.of(mismatch)
        if len(mismatch):
            stats["mismatch_max"] = Max(mismatch.max().item())
    return stats
