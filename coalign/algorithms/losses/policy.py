"""Losses of policies (PPO's clipped surrogate, its relatives, REINFORCE) and of value models.

Each of a policy is a surrogate [T] in `policy_loss`, which adds divergence, entropy and the weights of
coalign.algorithms.importance. Where a peer computes another thing than the paper, the docstring says so.
"""

from __future__ import annotations

from typing import Literal

import torch

from coalign.algorithms.importance import Level, importance_ratios
from coalign.algorithms.losses.terms import (
    Surrogate,
    bounded_exp,
    check_clips,
    clip_range,
    clipped_surrogate,
    policy_loss,
    sequence_mean,
)
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
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
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
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
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
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs.detach() - old)
    weight = ratio.clamp(*clip_range(clip_low, clip_high))
    return -weight * advantages * logprobs, ratio, {"clip_fraction": Stat.of(weight != ratio)}


@policy_loss
def sapo(x: LossInput, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Surrogate:
    """SAPO (2511.20347): the ratio goes through a soft gate, where PPO clips it.

    -(4/τ) σ(τ(ρ - 1)) A per token, with ρ = π/π_old and τ = ``tau_pos`` where A > 0, else ``tau_neg``. The gradient is
    that of -ρA times the gate 4σ(1 - σ): 1 at ρ = 1, falling smoothly to both sides, and faster for a larger τ. So the
    value at ρ = 1 is -2A/τ, as in the paper, verl and TRL; only its gradient has a meaning.

    The paper's mean is `sequence_mean_token_mean`. Reads and raises as policy_gradient does, and ValueError for a
    temperature that is not above 0; the other settings are those of terms.add_policy_terms.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"loss.tau_pos is {tau_pos} and loss.tau_neg is {tau_neg}: both temperatures must exceed 0")
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
    ratio = bounded_exp(logprobs - old)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio)
    opened = (tau * (ratio - 1)).sigmoid()
    return -4 / tau * opened * advantages, ratio, {"gate": Stat.of(4 * opened * (1 - opened))}


@policy_loss
def gmpo(x: LossInput, *, clip_low: float = 0.4, clip_high: float = 0.4, is_level: Level) -> Surrogate:
    """GMPO (2507.20673): the geometric mean over a response of its clipped token ratios, at each of its tokens.

    -A exp(mean of c_t), with c_t = min(log ρ_t, clip_high) where A > 0 and max(log ρ_t, -clip_low) where A < 0. So the
    clip range is one of logarithms: 0.4 is the paper's (e^-0.4, e^0.4). Unlike GSPO's, the clip is per token, and a
    clipped token loses its gradient alone. A is the mean of the sequence's advantages.

    verl clips in the same way. The pseudo-code of the paper clips sgn(A) log ρ, which differs from its formula, and
    from this one, if the two ends of the range differ. Aggregations and `is_level` are those of gspo's form `sequence`.

    Reads and raises as policy_gradient does; the other settings are those of terms.add_policy_terms.
    """
    check_clips(clip_low, clip_high)
    if is_level == "token":
        raise ValueError("loss.is_level is 'token': in `gmpo` a response has one ratio; take `sequence` or `product`")
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
    advantages = sequence_mean(x, advantages)
    log_ratio = logprobs - old
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = bounded_exp(sequence_mean(x, clipped))
    return -ratio * advantages, ratio, {"clip_fraction": Stat.of((clipped != log_ratio) & (advantages != 0))}


gmpo.aggregations = gspo.aggregations


@policy_loss
def kl_cov(x: LossInput, *, cov_coef: float = 1.0) -> Surrogate:
    """KL-Cov (2505.22617): the ratio without a clip, and a penalty on the tokens that lower the entropy most.

    -ρA + cov_coef · |log ρ| where the column `high_covariance` is True, -ρA elsewhere. The section
    `covariance: {fn: kl_cov}` marks these tokens over the whole roll-out. |log ρ| is what the authors' code and verl
    take for the paper's KL(π_old ‖ π); its gradient is 0 in the first update of a batch, where ρ = 1.

    Reads and raises as policy_gradient does, and ValueError without that column; the other settings are those of
    terms.add_policy_terms.
    """
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
    marked = x.require_column("high_covariance")
    log_ratio = logprobs - old
    ratio, distance = bounded_exp(log_ratio), log_ratio.abs()
    penalty = torch.where(marked, cov_coef * distance, 0.0)
    stats: Stats = {"cov_fraction": Stat.of(marked), "cov_distance": Stat.of(distance, marked)}
    return penalty - ratio * advantages, ratio, stats


@policy_loss
def reinforce(x: LossInput) -> Surrogate:
    """REINFORCE: -A log π per token, without a ratio; the loss of GPG (2504.02546).

    On policy its gradient is that of policy_gradient. Later updates of a batch are not corrected for.

    Reads logprobs and advantages; the other settings are those of terms.add_policy_terms.
    """
    logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
    return -advantages * logprobs, bounded_exp(logprobs.detach() - old), {}


@policy_loss
def topr(x: LossInput, *, ratio_limit: float = 1.0, is_level: Level) -> Surrogate:
    """TOPR (2503.14286): REINFORCE that lets go of mistakes which the policy no longer makes.

    -w A log π per token. w is 1 where A >= 0, as in supervised learning, and sg(min(π/μ, ratio_limit)) of the whole
    response where A < 0, with μ the policy that sampled (`rollout`). So it needs no clip and no reference, however old
    the samples are. The ratio is the product over the response, as in the paper; verl takes the geometric mean, ROLL
    the ratio of each token. The paper's sum over tokens is the aggregation `sequence_mean_token_sum`.

    Reads logprobs, rollout, advantages. ValueError for a limit that is not above 0, and with `is_level`, which would
    correct for the sampler twice; the other settings are those of terms.add_policy_terms.
    """
    if ratio_limit <= 0:
        raise ValueError(f"loss.ratio_limit is {ratio_limit}: it bounds the weight of a mistake and must exceed 0")
    if is_level != "none":
        raise ValueError(f"loss.is_level is '{is_level}': `topr` has the sampler in its own ratio; leave it out")
    logprobs, rollout, advantages = (x.require(name) for name in ("logprobs", "rollout", "advantages"))
    ratios = importance_ratios(logprobs.detach(), rollout, x.segment, x.sequences, level="product")
    ratio = ratios[x.segment].to(logprobs)
    weight = torch.where(advantages < 0, ratio.clamp(max=ratio_limit), 1.0)
    stats: Stats = {"taper": Stat.of(weight, advantages < 0)}
    return -weight * advantages * logprobs, ratio, stats


def value(x: LossInput, *, clip: float | None = None) -> LossOutput:
    """½ (V - R)² per token; with ``clip`` c, ½ max((V - R)², (V_old + clip(V - V_old, -c, c) - R)²).

    The clipped form is that of OpenAI's PPO. Reads values, returns; old_values if ``clip``.
    """
    values, returns = x.require("values"), x.require("returns")
    error = (values - returns).square()
    stats: Stats = {"values": Stat.of(values), "returns": Stat.of(returns), "squared_error": Stat.of(error)}
    if clip is not None:
        old = x.require("old_values", "clip")
        clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
        stats["clip_fraction"] = Stat.of(clipped > error)
        error = torch.maximum(error, clipped)
    return LossOutput(error / 2, stats)
