"""The clipped policy gradient and its settings."""

from __future__ import annotations

import torch

from coalign.algorithms.losses.terms import Surrogate, bounded_exp, clip_range, clipped_surrogate, policy_loss
from coalign.algorithms.traits import read
from coalign.types import LossInput, Stat


@policy_loss
def policy_gradient(
    x: LossInput,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """The clipped surrogate of PPO (1707.06347), per token, with the settings of its descendants.

    max(-ρA, -clip(ρ, 1 - clip_low, 1 + clip_high) A), with ρ = π/π_old; DAPO (2503.14476) raises ``clip_high``. log ρ
    is held within ±20, where the gradient is 0.

    ``dual_clip`` c > 1 bounds it by -cA where A < 0 (1912.09729). Divergence, entropy and the correction for the
    sampler are those of coalign.algorithms.losses.terms.surrounded, as in all losses of a policy.

    Reads logprobs, old, advantages, and what those settings ask for; ValueError if one is missing.
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
    return surrogate, ratio, stats
