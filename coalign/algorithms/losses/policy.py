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
    kl_corrected: bool = False,
    entropy_coef: float = 0.0,
    measure_entropy: bool = False,
    is_level: Level = "none",
    is_mode: Mode = "truncate",
    is_low: float = 0.0,
    is_high: float = 2.0,
    drift_limit: float | None = None,
) -> LossOutput:
    """The clipped surrogate of PPO (1707.06347), per token, with the settings of its descendants.

    max(-ρA, -clip(ρ, 1 - clip_low, 1 + clip_high) A), with ρ = π/π_old; DAPO (2503.14476) raises ``clip_high``. log ρ
    is held within ±20, where the gradient is 0.

    - ``dual_clip`` c > 1 bounds it by -cA where A < 0 (1912.09729).
    - ``kl_coef`` adds the divergence from the reference as a loss (2402.03300), with ``kl_corrected`` times ρ: then the
      gradient of k3, too, is that of KL(π‖π_ref), also off policy (2512.02556).
    - ``entropy_coef`` subtracts the entropy, which ``measure_entropy`` only reports.
    - ``is_level`` weighs the surrogate by π_old/π_rollout, with ``is_mode``, ``is_low`` and ``is_high`` (see
      coalign.algorithms.importance).
    - ``drift_limit`` lets go of tokens with A < 0 in a sequence whose mean of log π_rollout/π exceeds it: mistakes that
      the policy would hardly make any more (2512.02556).

    Reads logprobs, old, advantages; rollout if ``is_level`` or ``drift_limit``, ref if ``kl_coef``, entropy if asked
    for; ValueError if one is missing.
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
        kl_corrected=kl_corrected,
        entropy_coef=entropy_coef,
        is_level=is_level,
        is_mode=is_mode,
        is_low=is_low,
        is_high=is_high,
        drift_limit=drift_limit,
    )


policy_gradient.needs = policy_needs
