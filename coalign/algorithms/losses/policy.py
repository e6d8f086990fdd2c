"""Losses of policies (clipped policy gradient, GSPO, CISPO) and of value models."""

from __future__ import annotations

from typing import Literal

import torch

from coalign.algorithms.importance import Level
from coalign.algorithms.losses.terms import (
    Surrogate,
    bounded_exp,
    clip_range,
    clipped_surrogate,
    policy_loss,
    sequence_mean,
)
from coalign.algorithms.traits import require_input
from coalign.types import LossInput, LossOutput, Stat, Stats


@policy_loss
def policy_gradient(
    x: LossInput,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate (1707.06347) per token, with the settings of its descendants.

    max(-ρA, -clip(ρ, 1 - clip_low, 1 + clip_high) A), with ρ = π/π_old; DAPO (2503.14476) raises ``clip_high``. log ρ
    is clamped to ±20, where the gradient is 0. ``dual_clip`` c > 1 bounds the loss by -cA where A < 0 (1912.09729). The
    other settings are those of coalign.algorithms.losses.terms.add_policy_terms, as for all losses of a policy.

    Reads logprobs, old, advantages, and what those settings need; ValueError if one is missing.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(
            f"loss.dual_clip is {dual_clip}: it bounds the ratio from above and must exceed 1 (3 is usual)"
        )
    logprobs, old, advantages = (require_input(x, name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs - old)
    surrogate, stats = clipped_surrogate(ratio, advantages, *clip_range(clip_low, clip_high))
    if dual_clip is not None:
        bound = -dual_clip * advantages
        too_far = (advantages < 0) & (surrogate > bound)
        surrogate = torch.where(too_far, bound, surrogate)
        stats["dual_clip_fraction"] = Stat.of(too_far)
    return surrogate, ratio, stats


@policy_loss
def gspo(
    x: LossInput,
    *,
    form: Literal["sequence", "token"] = "sequence",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    is_level: Level,
) -> Surrogate:
    """GSPO (2507.18071): the clipped surrogate with one importance ratio s per sequence, at each of its tokens.

    max(-sA, -clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean over the sequence of log π/π_old). The mean
    varies little, so the clip range is a thousandth of PPO's.

    - ``form`` `sequence`: A is the mean of the sequence's advantages.
    - `token` (GSPO-token): each token has its own advantage, and its gradient is that of its own log-prob only: s in
      value, sg(s) π/sg(π) in gradient. If the advantages of a sequence are equal, value and gradient equal `sequence`.

    The paper's mean over sequences is the aggregation `sequence_mean_token_mean`; `sequence_mean_token_sum` weighs by
    length (LUSPO, 2602.05261), and `constant` divides by another constant. `token_mean` is refused. So are weights per
    token (``is_level: token``) in the form `sequence`, where all tokens are one event.

    Reads and raises as policy_gradient does; the other settings are those of terms.add_policy_terms.
    """
    if form not in ("sequence", "token"):
        raise ValueError(f"loss.form is '{form}': expected sequence or token")
    if form == "sequence" and is_level == "token":
        raise ValueError("loss.is_level is 'token': `gspo` in the form `sequence` takes `sequence` or `product`")
    logprobs, old, advantages = (require_input(x, name) for name in ("logprobs", "old", "advantages"))
    log_ratio = sequence_mean(x, logprobs - old)
    if form == "sequence":
        advantages = sequence_mean(x, advantages)
    else:
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
    ratio = bounded_exp(log_ratio)
    surrogate, stats = clipped_surrogate(ratio, advantages, *clip_range(clip_low, clip_high))
    return surrogate, ratio, stats


gspo.aggregations = ("sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


@policy_loss
def cispo(
    x: LossInput,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """CISPO (2506.13585): REINFORCE with a clipped importance weight.

    -sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π per token, with ρ = π/π_old. Every token keeps its gradient, also
    the rare but important ones that PPO's clip silences first. By default there is no lower bound, as in the paper, and
    the upper one is 5 (2510.13786).

    Reads and raises as policy_gradient does; the other settings are those of terms.add_policy_terms.
    """
    logprobs, old, advantages = (require_input(x, name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs.detach() - old)
    weight = ratio.clamp(*clip_range(clip_low, clip_high))
    return -weight * advantages * logprobs, ratio, {"clip_fraction": Stat.of(weight != ratio)}


def value(x: LossInput, *, clip: float | None = None) -> LossOutput:
    """½ (V - R)² per token; with ``clip`` c, ½ max((V - R)², (V_old + clip(V - V_old, -c, c) - R)²).

    The clipped form is that of OpenAI's PPO. Reads values, returns; old_values if ``clip``.
    """
    values, returns = require_input(x, "values"), require_input(x, "returns")
    error = (values - returns).square()
    stats: Stats = {"values": Stat.of(values), "returns": Stat.of(returns), "squared_error": Stat.of(error)}
    if clip is not None:
        old = require_input(x, "old_values", "clip")
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        stats["clip_fraction"] = Stat.of(clipped > error)
        error = torch.maximum(error, clipped)
    return LossOutput(error / 2, stats)
