"""Losses of policies (PPO's clipped surrogate, its relatives, REINFORCE) and of value models.

Each policy loss is a surrogate [T]; its base, `PolicyLoss`, adds divergence, entropy and the weights of
coalign.algorithms.divergence. Where another framework differs from the paper, the docstring says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coalign.algorithms.divergence import MAX_LOG_RATIO, Level, Mode, estimate_kl, importance_ratios, importance_weights
from coalign.algorithms.objective import Loss
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import LossInput, LossOutput, Max, Stat, Stats

Surrogate = tuple[Tensor, Tensor, Stats]  # surrogate [T], importance ratio [T], statistics
_OVER_SEQUENCES = ("sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    """e^x with x clamped to ±20, where the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sequence_mean(x: LossInput, values: Tensor) -> Tensor:
    """[T]: at each token the mean of ``values`` [T] over its sequence, summed in float64."""
    sums = segment_sum(values.double(), x.segment, x.sequences)
    return (sums / segment_count(x.segment, x.sequences).clamp(min=1))[x.segment].to(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss(Loss):
    """weight · surrogate + kl_coef · KL(π‖π_ref) - entropy_coef · entropy, [T], with statistics of all three.

    - ``kl_coef`` adds the divergence from the reference as a loss (2402.03300). ``kl_corrected`` multiplies it by ρ:
      the gradient of k3 is then that of KL(π‖π_ref), also off policy (2512.02556).
    - ``entropy_coef`` subtracts the entropy; ``measure_entropy`` only reports it.
    - ``is_level`` weighs the surrogate alone by π_old/π_rollout, with ``is_mode``, ``is_low`` and ``is_high`` (see
      coalign.algorithms.divergence); the bounds have to include 1.
    - ``drift_limit`` drops tokens with A < 0 in a sequence whose mean of log π_rollout/π exceeds it: mistakes that the
      policy would hardly make any more (2512.02556).

    Reads rollout if ``is_level`` or ``drift_limit``, ref if ``kl_coef``, entropy if requested; ValueError if one is
    missing.
    """

    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_corrected: bool = False
    entropy_coef: float = 0.0
    measure_entropy: bool = False
    is_level: Level = "none"
    is_mode: Mode = "truncate"
    is_low: float = 0.0
    is_high: float = 2.0
    drift_limit: float | None = None

    def __post_init__(self) -> None:
        if self.is_level != "none" and not 0 <= self.is_low <= 1 <= self.is_high:
            self.refuse("the weight on policy, 1, lies between them", "is_low", "is_high")

    @property
    def needs(self) -> Sequence[str]:
        entropy = self.entropy_coef or self.measure_entropy
        return (*(["entropy"] if entropy else []), *(["ref"] if self.kl_coef else []))

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        """What policy losses differ in: surrogate [T], importance ratio [T] and statistics, from columns [T]."""
        raise NotImplementedError

    def __call__(self, x: LossInput) -> LossOutput:
        logprobs, old, advantages = (x.require(name) for name in ("logprobs", "old", "advantages"))
        value, ratio, stats = self.surrogate(x, logprobs, old, advantages)
        stats = {**stats, "policy_gradient": Stat.of(value), **_ratio_stats(x, logprobs, old, ratio)}
        if self.is_level != "none":
            x.require("rollout", "is_level")
        if self.measure_entropy:
            x.require("entropy", "measure_entropy")
        if x.rollout is not None:
            level, mode, low, high = self.is_level, self.is_mode, self.is_low, self.is_high
            weights, weight_stats = importance_weights(
                old, x.rollout, x.segment, x.sequences, level=level, mode=mode, low=low, high=high
            )
            stats |= weight_stats
            value = value * weights.to(value)
        if self.drift_limit is not None:
            drift = _sequence_mean(x, x.require("rollout", "drift_limit") - logprobs.detach())
            drifted = (advantages < 0) & (drift > self.drift_limit)
            stats["drift_fraction"] = Stat.of(drifted)
            value = torch.where(drifted, 0.0, value)
        if self.kl_coef:
            kl = estimate_kl(logprobs, x.require("ref", "kl_coef"), self.kl_estimator)
            value = value + self.kl_coef * (kl * _bounded_exp(logprobs - old) if self.kl_corrected else kl)
        if self.entropy_coef:
            value = value - self.entropy_coef * x.require("entropy", "entropy_coef")
        return LossOutput(value, stats)


@torch.no_grad()
def _ratio_stats(x: LossInput, logprobs: Tensor, old: Tensor, ratio: Tensor) -> Stats:
    """Statistics of the policy's distance from the anchor of its ratio (`approx_kl`) and from the reference."""
    stats: Stats = {
        "ratio": Stat.of(ratio),
        "approx_kl": Stat.of(estimate_kl(old, logprobs)),
        "approx_kl_k1": Stat.of(old - logprobs),
        "logprob": Stat.of(logprobs),
    }
    if x.ref is not None:
        stats["kl_ref"] = Stat.of(estimate_kl(logprobs, x.ref))
    if x.entropy is not None:
        stats["entropy"] = Stat.of(x.entropy)
    if len(ratio):
        stats["ratio_max"] = Max(ratio.max().item())
    return stats


@dataclass(frozen=True, kw_only=True, slots=True)
class _ClippedLoss(PolicyLoss):
    """A policy loss whose ratio is clipped to (1 - clip_low, 1 + clip_high). ValueError for a negative setting: the
    ratio 1 must lie between."""

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)  # super() does not know the class that `slots` makes anew
        if self.clip_low < 0 or self.clip_high < 0:
            self.refuse("neither may be below 0", "clip_low", "clip_high")

    def clip(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)

    def clipped_surrogate(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Stats]:
        """max(-ρA, -clip(ρ) A), and the share of values that the clip changes (`clip_fraction`)."""
        plain, clipped = -ratio * advantages, -self.clip(ratio) * advantages
        return torch.maximum(plain, clipped), {"clip_fraction": Stat.of(clipped > plain)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradient(_ClippedLoss):
    """PPO's clipped surrogate (1707.06347) per token, with the settings of its descendants.

    max(-ρA, -clip(ρ, 1 - clip_low, 1 + clip_high) A), with ρ = π/π_old; DAPO (2503.14476) raises ``clip_high``. log ρ
    is clamped to ±20, where the gradient is 0. ``dual_clip`` c > 1 bounds the loss by -cA where A < 0 (1912.09729).

    Like all losses of a policy it reads logprobs, old, advantages, and what the settings of `PolicyLoss` need.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        _ClippedLoss.__post_init__(self)
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            self.refuse("it bounds the ratio from above; use more than 1 (3 is usual)", "dual_clip")

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        ratio = _bounded_exp(logprobs - old)
        surrogate, stats = self.clipped_surrogate(ratio, advantages)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            too_far = (advantages < 0) & (surrogate > bound)
            surrogate = torch.where(too_far, bound, surrogate)
            stats["dual_clip_fraction"] = Stat.of(too_far)
        return surrogate, ratio, stats


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOLoss(_ClippedLoss):
    """GSPO (2507.18071): the clipped surrogate with one importance ratio s per sequence, at each of its tokens.

    max(-sA, -clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean over the sequence of log π/π_old). The mean
    varies little, so the clip range is a thousandth of PPO's.

    - ``form`` `sequence`: A is the mean of the sequence's advantages.
    - `token` (GSPO-token): each token has its own advantage, and its gradient is that of its own log-prob only: s in
      value, sg(s) π/sg(π) in gradient. If the advantages of a sequence are equal, value and gradient equal `sequence`.

    The paper's mean over sequences is the aggregation `sequence_mean_token_mean`; `sequence_mean_token_sum` weighs by
    length (LUSPO, 2602.05261), and `constant` divides by another constant. `token_mean` is refused. So are weights per
    token (``is_level: token``) in the form `sequence`, where all tokens are one event.
    """

    aggregations = _OVER_SEQUENCES
    form: Literal["sequence", "token"] = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        _ClippedLoss.__post_init__(self)
        if self.form == "sequence" and self.is_level == "token":
            self.refuse("`gspo` in the form `sequence` takes `sequence` or `product`", "is_level")

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        log_ratio = _sequence_mean(x, logprobs - old)
        if self.form == "sequence":
            advantages = _sequence_mean(x, advantages)
        else:
            log_ratio = log_ratio.detach() + (logprobs - logprobs.detach())
        ratio = _bounded_exp(log_ratio)
        surrogate, stats = self.clipped_surrogate(ratio, advantages)
        return surrogate, ratio, stats


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOLoss(_ClippedLoss):
    """CISPO (2506.13585): REINFORCE with a clipped importance weight.

    -sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π per token, with ρ = π/π_old. Every token keeps its gradient, also
    the rare but important ones that PPO's clip silences first. By default there is no lower bound, as in the paper, and
    the upper one is 5 (2510.13786).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        ratio = _bounded_exp(logprobs.detach() - old)
        weight = self.clip(ratio)
        return -weight * advantages * logprobs, ratio, {"clip_fraction": Stat.of(weight != ratio)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SAPOLoss(PolicyLoss):
    """SAPO (2511.20347): the ratio goes through a soft gate, where PPO clips it.

    -(4/τ) σ(τ(ρ - 1)) A per token, with ρ = π/π_old and τ = ``tau_pos`` where A > 0, else ``tau_neg``. The gradient is
    that of -ρA times the gate 4σ(1 - σ): 1 at ρ = 1, falling smoothly to both sides, and faster for a larger τ. So the
    value at ρ = 1 is -2A/τ, as in the paper, verl and TRL; only its gradient has a meaning.

    The paper's mean is `sequence_mean_token_mean`. ValueError for a temperature that is not above 0.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            self.refuse("both temperatures must exceed 0", "tau_pos", "tau_neg")

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        ratio = _bounded_exp(logprobs - old)
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(ratio)
        opened = (tau * (ratio - 1)).sigmoid()
        return -4 / tau * opened * advantages, ratio, {"gate": Stat.of(4 * opened * (1 - opened))}


@dataclass(frozen=True, kw_only=True, slots=True)
class GMPOLoss(_ClippedLoss):
    """GMPO (2507.20673): the geometric mean over a response of its clipped token ratios, at each of its tokens.

    -A exp(mean of c_t), with c_t = min(log ρ_t, clip_high) where A > 0 and max(log ρ_t, -clip_low) where A < 0. So the
    clip range is one of logarithms: 0.4 is the paper's (e^-0.4, e^0.4). Unlike GSPO's, the clip is per token, and a
    clipped token loses its gradient alone. A is the mean of the sequence's advantages.

    verl clips in the same way. The pseudo-code of the paper clips sgn(A) log ρ, which differs from its formula, and
    from this one, if the two ends of the range differ. Aggregations and `is_level` are those of gspo's form `sequence`.
    """

    aggregations = _OVER_SEQUENCES
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        _ClippedLoss.__post_init__(self)
        if self.is_level == "token":
            self.refuse("in `gmpo` a response has one ratio; take `sequence` or `product`", "is_level")

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        advantages = _sequence_mean(x, advantages)
        log_ratio = logprobs - old
        clipped = torch.where(advantages > 0, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))
        ratio = _bounded_exp(_sequence_mean(x, clipped))
        return -ratio * advantages, ratio, {"clip_fraction": Stat.of((clipped != log_ratio) & (advantages != 0))}


@dataclass(frozen=True, kw_only=True, slots=True)
class KLCovLoss(PolicyLoss):
    """KL-Cov (2505.22617): the ratio without a clip, and a penalty on the tokens that lower the entropy most.

    -ρA + cov_coef · |log ρ| where the column `high_covariance` is True, -ρA elsewhere. The section
    `covariance: {fn: kl_cov}` marks these tokens over the whole rollout. Like the authors' code and verl, this takes
    |log ρ| for the paper's KL(π_old ‖ π); its gradient is 0 in the first update of a batch, where ρ = 1.
    """

    cov_coef: float = 1.0

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        marked = x.require_column("high_covariance")
        log_ratio = logprobs - old
        ratio, distance = _bounded_exp(log_ratio), log_ratio.abs()
        penalty = torch.where(marked, self.cov_coef * distance, 0.0)
        stats: Stats = {"cov_fraction": Stat.of(marked), "cov_distance": Stat.of(distance, marked)}
        return penalty - ratio * advantages, ratio, stats


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceLoss(PolicyLoss):
    """REINFORCE: -A log π per token, without a ratio; the loss of GPG (2504.02546).

    On policy its gradient is that of policy_gradient. Later updates of a batch are not corrected for.
    """

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        return -advantages * logprobs, _bounded_exp(logprobs.detach() - old), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class TOPRLoss(PolicyLoss):
    """TOPR (2503.14286): REINFORCE that lets go of mistakes which the policy no longer makes.

    -w A log π per token. w is 1 where A >= 0, as in supervised learning, and sg(min(π/μ, ratio_limit)) of the whole
    response where A < 0, with μ the policy that sampled (`rollout`). So it needs no clip and no reference, however old
    the samples are. The ratio is the product over the response, as in the paper; verl takes the geometric mean, ROLL
    the ratio of each token. The paper's sum over tokens is the aggregation `sequence_mean_token_sum`.

    Reads rollout, too. ValueError for a limit that is not above 0, and with `is_level`, which would correct for the
    sampler twice.
    """

    ratio_limit: float = 1.0

    def __post_init__(self) -> None:
        if self.ratio_limit <= 0:
            self.refuse("it bounds the weight of a mistake and must exceed 0", "ratio_limit")
        if self.is_level != "none":
            self.refuse("`topr` has the sampler in its own ratio; leave it out", "is_level")

    def surrogate(self, x: LossInput, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Surrogate:
        rollout = x.require("rollout")
        ratios = importance_ratios(logprobs.detach(), rollout, x.segment, x.sequences, level="product")
        ratio = ratios[x.segment].to(logprobs)
        weight = torch.where(advantages < 0, ratio.clamp(max=self.ratio_limit), 1.0)
        stats: Stats = {"taper": Stat.of(weight, advantages < 0)}
        return -weight * advantages * logprobs, ratio, stats


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss(Loss):
    """½ (V - R)² per token; with ``clip`` c, ½ max((V - R)², (V_old + clip(V - V_old, -c, c) - R)²).

    The clipped form is that of OpenAI's PPO. Reads values, returns; old_values if ``clip``.
    """

    clip: float | None = None

    def __call__(self, x: LossInput) -> LossOutput:
        values, returns = x.require("values"), x.require("returns")
        error = (values - returns).square()
        stats: Stats = {"values": Stat.of(values), "returns": Stat.of(returns), "squared_error": Stat.of(error)}
        if self.clip is not None:
            old = x.require("old_values", "clip")
            clipped = (old + (values - old).clamp(-self.clip, self.clip) - returns).square()
            stats["clip_fraction"] = Stat.of(clipped > error)
            error = torch.maximum(error, clipped)
        return LossOutput(error / 2, stats)
