"""Direct preference optimisation and its descendants, which compare a policy with a frozen reference.

At the end: losses without a reference, and for unpaired feedback. All others read logprobs, ref and the column
`preference`. r is the log-ratio log π - log π_ref of a response, summed over its tokens; w is the better response of a
pair, l the worse one; z = β (r_w - r_l). ``beta`` is β, and ``nll_coef`` adds that much of the better response's
negative log-likelihood per token (2404.19733). Names in YAML are those of TRL's ``loss_type``. The value is one per
group, the mean over its pairs.

The losses by optimal transport (AOT, 2406.05882) compare distributions, not pairs: the better responses' rewards,
sorted, should lie above the worse ones', sorted (stochastic dominance). Sorting needs every pair at once, so an update
is one micro-batch, and the value is one number, the mean over all pairs of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.algorithms.comparisons import (
    PreferencePairs,
    accuracy,
    check_smoothing,
    compare_responses,
    lengths,
    log_ratios,
    logistic,
    read_pairs,
    response_logprobs,
    token_log_ratios,
)
from coalign.algorithms.objective import Loss
from coalign.algorithms.segments import segment_sum
from coalign.types import LossInput, LossOutput, Stat, Stats

MAX_EXPONENT = 80.0  # e^80: beyond any log-ratio of use, and its square does not overflow float64


@dataclass(frozen=True, kw_only=True, slots=True)
class _PairwiseLoss(Loss):
    """The mean over the pairs of each group of what `compare` says of a pair's implicit rewards β r."""

    per = "group"
    needs = ("ref",)
    beta: float = 0.1
    nll_coef: float = 0.0

    def rewards(self, x: LossInput) -> Tensor:
        """f64[N]: the implicit reward of each response."""
        return self.beta * log_ratios(x)

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        """[P]: the loss of each pair, from the rewards of its responses."""
        raise NotImplementedError

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, rewards = read_pairs(x), self.rewards(x)
        return compare_responses(x, pairs, self.compare(*pairs.split(rewards)), rewards, self.nll_coef)


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOLoss(_PairwiseLoss):
    """-log σ(z) (2305.18290), with variants that each change one part.

    - ``label_smoothing`` ε: labels wrong with that probability. -(1 - ε) log σ(z) - ε log σ(-z) (cDPO), or with
      ``robust`` the unbiased [-(1 - ε) log σ(z) + ε log σ(-z)] / (1 - 2ε) (rDPO, 2403.00409).
    - ``length_normalised``: r divided by the response's tokens (TRL's sigmoid_norm).
    - ``divergence``: f'(π/π_ref) in place of r (f-DPO, 2309.16240); ``alpha`` is the order of `alpha`, which is
      `forward_kl` at 0 and `reverse_kl` at 1.
    - ``ld_alpha``: weight of the tokens beyond the shorter response's length (LD-DPO, 2409.06411).
    - ``margin_coef``: z less that much of the difference in the column `margin` (ODPO, 2402.10571).
    - ``weighted``: a pair is weighted by how likely the policy is to write both responses: the product of exp(mean over
      tokens of log π - log Σ π²) (WPO, 2406.11827).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    robust: bool = False
    length_normalised: bool = False
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    alpha: float = 0.5
    ld_alpha: float = 1.0
    margin_coef: float = 0.0
    weighted: bool = False

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("ref", "collision") if self.weighted else ("ref",)

    def __call__(self, x: LossInput) -> LossOutput:
        smoothing, pairs, ratios = self.label_smoothing, read_pairs(x), log_ratios(x)
        compare = pairs.split(ratios) if self.ld_alpha == 1 else _weigh_excess_tokens(x, pairs, self.ld_alpha)
        winner, loser = (_divergence_gradient(r, self.divergence, self.alpha) for r in compare)
        if self.length_normalised:
            winner, loser = (r / n for r, n in zip((winner, loser), pairs.split(lengths(x)), strict=True))
        z = self.beta * (winner - loser)
        if self.margin_coef:
            z = z - self.margin_coef * pairs.difference(x.require_column("margin", "margin_coef"))
        if self.robust:
            losses = ((1 - smoothing) * F.softplus(-z) - smoothing * F.softplus(z)) / (1 - 2 * smoothing)
        else:
            losses = logistic(z, smoothing)
        if self.weighted:
            losses = losses * math.prod(pairs.split(_likelihood_weights(x)))
        return compare_responses(x, pairs, losses, self.beta * ratios, self.nll_coef)


def _divergence_gradient(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(e^ratio) of the divergence, up to a constant; exponents are clamped to ±80."""
    if divergence == "js":
        return math.log(2) + F.logsigmoid(ratio)
    order = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": alpha}[divergence] - 1
    return ratio if order == 0 else torch.expm1((order * ratio).clamp(max=MAX_EXPONENT)) / order


@torch.no_grad()
def _likelihood_weights(x: LossInput) -> Tensor:
    """f64[N]: the policy's likelihood of each response per token, relative to its certainty (WPO)."""
    aligned = x.require("logprobs").double() - x.require("collision", "weighted")
    return (segment_sum(aligned, x.segment, x.sequences) / lengths(x)).exp()


def _weigh_excess_tokens(x: LossInput, pairs: PreferencePairs, ld_alpha: float) -> tuple[Tensor, Tensor]:
    """Log-ratios of winners and losers, [P] each; tokens beyond their common length have weight ``ld_alpha``."""
    running = F.pad(token_log_ratios(x).cumsum(0), (1, 0))
    sizes = torch.bincount(x.segment, minlength=x.sequences)
    starts = sizes.cumsum(0) - sizes
    shared = torch.minimum(*pairs.split(sizes))

    def weighted(row: Tensor) -> Tensor:
        begin, end = starts[row], starts[row] + sizes[row]
        head, total = (running[stop] - running[begin] for stop in (begin + shared, end))
        return head + ld_alpha * (total - head)

    return weighted(pairs.winner), weighted(pairs.loser)


@dataclass(frozen=True, kw_only=True, slots=True)
class IPOLoss(_PairwiseLoss):
    """(r_w/|w| - r_l/|l| - 1/(2β))², with log-ratios *averaged* over tokens (2310.12036; TRL has it from the authors).

    β is the paper's τ. OpenRLHF sums where this averages.
    """

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, ratios = read_pairs(x), log_ratios(x) / lengths(x)
        losses = (pairs.difference(ratios) - 1 / (2 * self.beta)).square()
        return compare_responses(x, pairs, losses, self.beta * ratios, self.nll_coef)


@dataclass(frozen=True, kw_only=True, slots=True)
class HingeLoss(_PairwiseLoss):
    """max(0, 1 - z) (SLiC, 2305.10425, against a reference as in RSO, 2309.06657)."""

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return (1 - (winner - loser)).relu()


@dataclass(frozen=True, kw_only=True, slots=True)
class EXOPairLoss(_PairwiseLoss):
    """EXO-pref (2402.00856, eq. 16): KL from (σ(z), σ(-z)) to (1 - ε, ε). ε = ``label_smoothing`` is above 0."""

    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing, least=1e-12)

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        z, smoothing = winner - loser, self.label_smoothing
        won, lost = F.logsigmoid(z), F.logsigmoid(-z)
        return won.exp() * (won - math.log1p(-smoothing)) + lost.exp() * (lost - math.log(smoothing))


@dataclass(frozen=True, kw_only=True, slots=True)
class NCAPairLoss(_PairwiseLoss):
    """NCA (2402.05369): -log σ(βr_w) - ½ log σ(-βr_w) - ½ log σ(-βr_l)."""

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return F.softplus(-winner) + 0.5 * F.softplus(winner) + 0.5 * F.softplus(loser)


@dataclass(frozen=True, kw_only=True, slots=True)
class BCOPairLoss(_PairwiseLoss):
    """BCO (2404.04656): -log σ(βr_w) - log σ(-βr_l).

    As in TRL's DPOTrainer without the paper's reward shift, a running mean over the steps: a loss keeps no state.
    """

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return F.softplus(-winner) + F.softplus(loser)


@dataclass(frozen=True, kw_only=True, slots=True)
class SPPOHardLoss(_PairwiseLoss):
    """SPPO (2405.00675, eq. 4.7) with probability 1 for the winner: (r_w - 1/(2β))² + (r_l + 1/(2β))²."""

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, ratios = read_pairs(x), log_ratios(x)
        winner, loser = pairs.split(ratios)
        losses = (winner - 0.5 / self.beta).square() + (loser + 0.5 / self.beta).square()
        return compare_responses(x, pairs, losses, self.beta * ratios, self.nll_coef)


@dataclass(frozen=True, kw_only=True, slots=True)
class APOZeroLoss(_PairwiseLoss):
    """APO-zero (2408.06266, eq. 7): σ(-βr_w) + σ(βr_l), for winners better than the policy's own responses."""

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return torch.sigmoid(-winner) + torch.sigmoid(loser)


@dataclass(frozen=True, kw_only=True, slots=True)
class APODownLoss(_PairwiseLoss):
    """APO-down (2408.06266, eq. 8): σ(βr_w) + σ(-z), for winners worse than the policy's own responses."""

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return torch.sigmoid(winner) + torch.sigmoid(loser - winner)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoPOPLoss(_PairwiseLoss):
    """DiscoPOP (2406.08414, eq. 5): (1 - m) · -log σ(z) + m e^(-z), with m = σ(z/τ)."""

    tau: float = 0.05

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        z = winner - loser
        # m e^(-z) as one exponential: for z far below 0 it is a product of nothing and infinity.
        exponential = (F.logsigmoid(z / self.tau) - z).clamp(max=MAX_EXPONENT).exp()
        return torch.sigmoid(-z / self.tau) * F.softplus(-z) + exponential


@dataclass(frozen=True, kw_only=True, slots=True)
class _TransportLoss(Loss):
    """-log σ(β Δ) of what `differences` gives, over all pairs of the batch."""

    per = "batch"
    needs = ("ref",)
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def differences(self, x: LossInput, pairs: PreferencePairs, ratios: Tensor) -> Tensor:
        """[P]: Δ, from the log-ratios [N] of the responses."""
        raise NotImplementedError

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, ratios = read_pairs(x), log_ratios(x)
        losses = logistic(self.beta * self.differences(x, pairs, ratios), self.label_smoothing)
        stats = compare_responses(x, pairs, losses, self.beta * ratios).stats
        return LossOutput((losses.sum() / max(1, len(losses)))[None], stats)


@dataclass(frozen=True, kw_only=True, slots=True)
class AOTLoss(_TransportLoss):
    """Sorted log π_w - log π_l against sorted log π_ref,w - log π_ref,l, by -log σ(β difference)."""

    def differences(self, x: LossInput, pairs: PreferencePairs, ratios: Tensor) -> Tensor:
        logprobs = response_logprobs(x)
        policy, reference = (
            pairs.difference(values).sort().values for values in (logprobs, logprobs.detach() - ratios.detach())
        )
        return policy - reference


@dataclass(frozen=True, kw_only=True, slots=True)
class AOTUnpairedLoss(_TransportLoss):
    """Sorted log-ratios of the winners against sorted log-ratios of the losers."""

    def differences(self, x: LossInput, pairs: PreferencePairs, ratios: Tensor) -> Tensor:
        winner, loser = (values.sort().values for values in pairs.split(ratios))
        return winner - loser


# ---- without a reference model: the policy's own log-probs are the rewards

MIN_DOUBT = 1e-6  # 1 - p is at least this: closer to 1 the odds are rounding error, and would overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class SimPOLoss(_PairwiseLoss):
    """-log σ(β log π_w / |w| - β log π_l / |l| - γ) (2405.14734). ``nll_coef`` makes it CPO-SimPO.

    ``alpha`` other than 0 bends the reward to (1 - p^-α)/α, where log p is the mean log-prob (AlphaPO, 2501.03884).
    """

    needs = ()
    beta: float = 2.0
    gamma: float = 0.5
    alpha: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def rewards(self, x: LossInput) -> Tensor:
        means = response_logprobs(x) / lengths(x)
        return self.beta * (-torch.expm1(-self.alpha * means) / self.alpha if self.alpha else means)

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return logistic(winner - loser - self.gamma, self.label_smoothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class CPOLoss(_PairwiseLoss):
    """-log σ(β log π_w - β log π_l) + nll_coef · NLL_w (2401.08417), sums over tokens, NLL per token."""

    needs = ()
    label_smoothing: float = 0.0
    nll_coef: float = 1.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def rewards(self, x: LossInput) -> Tensor:
        return self.beta * response_logprobs(x)

    def compare(self, winner: Tensor, loser: Tensor) -> Tensor:
        return logistic(winner - loser, self.label_smoothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class ORPOLoss(Loss):
    """NLL_w - β log σ(log odds_w - log odds_l) (2403.07691); β is the paper's λ.

    odds = p / (1 - p), where log p is the *mean* log-prob of a response's tokens; NLL_w is -log p of the winner. p is
    clamped to 1 - 1e-6, where the gradient of its odds is 0.
    """

    per = "group"
    beta: float = 0.1

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, means = read_pairs(x), response_logprobs(x) / lengths(x)
        clamped = means.clamp(max=-MIN_DOUBT)
        log_odds = pairs.difference(clamped - torch.log(-torch.expm1(clamped)))  # log(p / (1 - p)) of p = e^mean
        result = compare_responses(x, pairs, self.beta * F.softplus(-log_odds), self.beta * means, nll_coef=1.0)
        return LossOutput(result.value, result.stats | {"log_odds": Stat.of(log_odds)})


# ---- unpaired feedback: each response is desirable (`preference` 1) or not (0). It is compared with a reference point,
# not with another response. One value per sequence.


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnpairedLoss(Loss):
    per = "sequence"
    needs = ("ref",)
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def judge(self, x: LossInput, point: Tensor) -> LossOutput:
        """One value per sequence, from its log-ratio and its reference point [N]."""
        desirable = _read_desirable(x.require_column("preference"))
        ratios = log_ratios(x)
        sign = torch.where(desirable, 1.0, -1.0)
        gain = sign * self.beta * (ratios - point.to(ratios))
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        rewards, logprobs = self.beta * ratios.detach(), response_logprobs(x).detach()
        stats: Stats = {
            "rewards/chosen": Stat.of(rewards, desirable),
            "rewards/rejected": Stat.of(rewards, ~desirable),
            "logps/chosen": Stat.of(logprobs, desirable),
            "logps/rejected": Stat.of(logprobs, ~desirable),
            "accuracy": accuracy(gain.detach()),  # the share on the right side of the reference point
        }
        return LossOutput(weight * torch.sigmoid(-gain), stats)


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOLoss(_UnpairedLoss):
    """KTO (2402.01306): λ_D σ(-β(r - z0)) for desirable responses, λ_U σ(-β(z0 - r)) for undesirable ones.

    z0 is the column `reference_point`, in nats, without gradient: max(0, mean r of mismatched prompts and responses)
    over the whole batch, not over a micro-batch. λ_D and λ_U are the weights; with n_D and n_U responses of each kind,
    the authors advise λ_D n_D / (λ_U n_U) between 1 and 4/3. A batch may lack one kind.
    """

    def __call__(self, x: LossInput) -> LossOutput:
        point = x.require_column("reference_point")
        result = self.judge(x, point)
        return LossOutput(result.value, result.stats | {"kl": Stat.of(point)})


@dataclass(frozen=True, kw_only=True, slots=True)
class APOZeroUnpairedLoss(_UnpairedLoss):
    """KTO with 0 as the reference point (APO-zero, 2408.06266, without pairs)."""

    def __call__(self, x: LossInput) -> LossOutput:
        return self.judge(x, torch.zeros(x.sequences))


def _read_desirable(preference: Tensor) -> Tensor:
    wrong = (preference != 0) & (preference != 1)
    if bool(wrong.any()):
        raise ValueError(
            f"column `preference` holds {preference[wrong][0].item():g}: this loss judges each response by itself, as "
            "1 (desirable) or 0 (undesirable); rankings are for pairwise losses such as dpo"
        )
    return preference == 1
