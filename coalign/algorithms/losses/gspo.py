"""Group sequence policy optimisation: one ratio per sequence."""

from __future__ import annotations

from typing import Literal

from coalign.algorithms.importance import Level
from coalign.algorithms.losses.terms import (
    Surrogate,
    bounded_exp,
    clip_range,
    clipped_surrogate,
    policy_loss,
    sequence_mean,
)
from coalign.algorithms.traits import read
from coalign.types import LossInput


@policy_loss
def gspo(
    x: LossInput,
    *,
    form: Literal["sequence", "token"] = "sequence",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    is_level: Level,
) -> Surrogate:
    """max(-sA, -clip(s, 1 - clip_low, 1 + clip_high) A) with s = exp(mean over the sequence of log π/π_old), at every
    token of the sequence (2507.18071). The mean evens ratios out, so the clip range is a thousandth of PPO's.

    - ``form`` `sequence`: A is the mean of the sequence's advantages.
    - `token` (GSPO-token): each token has its own advantage and, as a gradient, only its own log-prob's: s in value,
      sg(s) π/sg(π) in gradient. Where the advantages of a sequence are equal, value and gradient are those of
      `sequence`.

    The paper's mean over sequences is the aggregation `sequence_mean_token_mean`; `sequence_mean_token_sum` weighs by
    length (LUSPO, 2602.05261), `constant` is the same over another constant. `token_mean` is refused. In the form
    `sequence` so are weights per token (``is_level: token``): all of its tokens are one event.

    Reads and raises as policy_gradient does; the other settings are those of terms.surrounded.
    """
    if form not in ("sequence", "token"):
        raise ValueError(f"loss.form is '{form}': expected sequence or token")
    if form == "sequence" and is_level == "token":
        raise ValueError("loss.is_level is 'token': `gspo` in the form `sequence` takes `sequence` or `product`")
    logprobs, old, advantages = (read(x, name) for name in ("logprobs", "old", "advantages"))
    log_ratio = sequence_mean(x, logprobs - old)
    if form == "sequence":
        advantages = sequence_mean(x, advantages)
    else:
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
    ratio = bounded_exp(log_ratio)
    surrogate, stats = clipped_surrogate(ratio, advantages, *clip_range(clip_low, clip_high))
    return surrogate, ratio, stats


gspo.aggregations = ("sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
