"""The clipped policy gradient and its settings."""

from __future__ import annotations

from typing import Literal

import torch

from coalign.algorithms.importance import Level, Mode
from coalign.algorithms.losses.terms import bounded_exp, clip_range, clipped_surrogate, policy_loss, policy_needs
from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Stat


def policy_gradient(
    x: LossInput,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    entropy_coef: float = 0.0,
    measure_entropy: bool = False,
    is_level: Level = "none",
    is_mode: Mode = "truncate",
    is_low: float = 0.0,
    is_high: float = 2.0,
) -> LossOutput:
    """The clipped surrogate of PPO (1707.06347), per token, with the settings of its descendants.

    max(-ρA, -clip(ρ, 1 - clip_low, 1 + clip_high) A), with ρ = π/π_old; DAPO (2503.14476) raises ``clip_high``.
    ``dual_clip`` c > 1 bounds it by -cA where A < 0 (1912.09729). ``kl_coef`` adds the divergence from the reference as
    a loss (2402.03300), ``entropy_coef`` subtracts the entropy, which ``measure_entropy`` only reports. log ρ is held
    within ±20, where the gradient is 0. ``is_level`` and its bounds weigh the surrogate by π_old/π_rollout
    (coalign.algorithms.importance).

    Reads logprobs, old, advantages; rollout if ``is_level``, ref if ``kl_coef``, entropy if asked for;
    ValueError if one is missing.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(
            f"loss.dual_clip is {dual_clip}: it bounds the ratio from above and must exceed 1 (3 is usual)"
        )
    logprobs, old, advantages = (read(x, name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs - old)
    surrogate, stats = clipped_surrogate(ratio, advantages, *clip_range(clip_low, clip_high))
    if dual_clip is not None:
        bound = -dual_clip * advantages
        too_far = (advantages < 0) & (surrogate > bound)
        surrogate = torch.where(too_far, bound, surrogate)
        stats["dual_clip_fraction"] = Stat.of(too_far)
    return policy_loss(
        x,
        surrogate,
        ratio,
        stats,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        is_level=is_level,
        is_mode=is_mode,
        is_low=is_low,
        is_high=is_high,
    )


policy_gradient.needs = policy_needs
