"""Clipped importance-sampling policy optimisation: the ratio is clipped, the gradient is not."""

from __future__ import annotations

from coalign.algorithms.losses.terms import Surrogate, bounded_exp, clip_range, policy_loss
from coalign.algorithms.traits import read
from coalign.types import LossInput, Stat


@policy_loss
def cispo(
    x: LossInput,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """-sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π per token, ρ = π/π_old (2506.13585).

    REINFORCE with a bounded weight: every token keeps a gradient, also the rare ones on which much depends and that
    PPO's clip silences first. The default has no lower bound, as in the paper, and 5 as the upper one (2510.13786).

    Reads and raises as policy_gradient does; the other settings are those of terms.surrounded.
    """
    logprobs, old, advantages = (read(x, name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs.detach() - old)
    weight = ratio.clamp(*clip_range(clip_low, clip_high))
    return -weight * advantages * logprobs, ratio, {"clip_fraction": Stat.of(weight != ratio)}
