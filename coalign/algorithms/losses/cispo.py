"""Clipped importance-sampling policy optimisation: the ratio is clipped, the gradient is not."""

from __future__ import annotations

from typing import Literal

from coalign.algorithms.importance import Level, Mode
from coalign.algorithms.losses.terms import bounded_exp, clip_range, policy_loss, policy_needs
from coalign.algorithms.traits import read
from coalign.types import LossInput, LossOutput, Stat


def cispo(
    x: LossInput,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
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
    """-sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π per token, ρ = π/π_old (2506.13585).

    REINFORCE with a bounded weight: every token keeps a gradient, also the rare ones on which much depends and that
    PPO's clip silences first. The default has no lower bound, as in the paper, and 5 as the upper one (2510.13786).

    Reads and raises as policy_gradient does, where the other settings are described.
    """
    logprobs, old, advantages = (read(x, name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs.detach() - old)
    weight = ratio.clamp(*clip_range(clip_low, clip_high))
    return policy_loss(
        x,
        -weight * advantages * logprobs,
        ratio,
        {"clip_fraction": Stat.of(weight != ratio)},
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


cispo.needs = policy_needs
