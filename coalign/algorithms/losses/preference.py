"""Direct preference optimisation and its descendants, which compare a policy with a frozen reference.

At the end: losses without a reference, and for unpaired feedback. All others read logprobs, ref and the column
`preference`. r is the log-ratio log π - log π_ref of a response, summed over its tokens; w is the better response of a
pair, l the worse one; z = β (r_w - r_l). ``beta`` is β, and ``nll_coef`` adds that much of the better response's
negative log-likelihood per token (2404.19733). Names are those of TRL's ``loss_type``. The value is one per group, the
mean over its pairs.

The losses by optimal transport (AOT, 2406.05882) compare distributions, not pairs: the better responses' rewards,
sorted, should lie above the worse ones', sorted (stochastic dominance). Sorting needs every pair at once, so an update
is one micro-batch, and the value is one number, the mean over all pairs of the batch.
"""

from __future__ import annotations

import math
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
from coalign.algorithms.segments import segment_sum
from coalign.types import LossInput, LossOutput, Stat, Stats

MAX_EXPONENT = 80.0  # e^80: beyond any log-ratio of use, and its square does not overflow float64


def dpo(
    x: LossInput,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
    length_normalised: bool = False,
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl",
    alpha: float = 0.5,
    ld_alpha: float = 1.0,
    margin_coef: float = 0.0,
    weighted: bool = False,
    nll_coef: float = 0.0,
) -> LossOutput:
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
    check_smoothing(label_smoothing)
    pairs, ratios = read_pairs(x), log_ratios(x)
    compare = pairs.split(ratios) if ld_alpha == 1 else _weigh_excess_tokens(x, pairs, ld_alpha)
    winner, loser = (_divergence_gradient(r, divergence, alpha) for r in compare)
    if length_normalised:
        winner, loser = (r / n for r, n in zip((winner, loser), pairs.split(lengths(x)), strict=True))
    z = beta * (winner - loser)
    if margin_coef:
        z = z - margin_coef * pairs.difference(x.require_column("margin", "margin_coef"))
    if robust:
        losses = ((1 - label_smoothing) * F.softplus(-z) - label_smoothing * F.softplus(z)) / (1 - 2 * label_smoothing)
    else:
        losses = logistic(z, label_smoothing)
    if weighted:
        losses = losses * math.prod(pairs.split(_likelihood_weights(x)))
    return compare_responses(x, pairs, losses, beta * ratios, nll_coef)


def ipo(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """(r_w/|w| - r_l/|l| - 1/(2β))², with log-ratios *averaged* over tokens (2310.12036; TRL has it from the authors).

    β is the paper's τ. OpenRLHF sums where this averages.
    """
    pairs, ratios = read_pairs(x), log_ratios(x) / lengths(x)
    return compare_responses(x, pairs, (pairs.difference(ratios) - 1 / (2 * beta)).square(), beta * ratios, nll_coef)


def hinge(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """max(0, 1 - z) (SLiC, 2305.10425, against a reference as in RSO, 2309.06657)."""
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    return compare_responses(x, pairs, (1 - pairs.difference(rewards)).relu(), rewards, nll_coef)


def exo_pair(x: LossInput, *, beta: float = 0.1, label_smoothing: float = 1e-3, nll_coef: float = 0.0) -> LossOutput:
    """EXO-pref (2402.00856, eq. 16): KL from (σ(z), σ(-z)) to (1 - ε, ε). ε = ``label_smoothing`` is above 0."""
    check_smoothing(label_smoothing, least=1e-12)
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    z = pairs.difference(rewards)
    won, lost = F.logsigmoid(z), F.logsigmoid(-z)
    losses = won.exp() * (won - math.log1p(-label_smoothing)) + lost.exp() * (lost - math.log(label_smoothing))
    return compare_responses(x, pairs, losses, rewards, nll_coef)


def nca_pair(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """NCA (2402.05369): -log σ(βr_w) - ½ log σ(-βr_w) - ½ log σ(-βr_l)."""
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    winner, loser = pairs.split(rewards)
    losses = F.softplus(-winner) + 0.5 * F.softplus(winner) + 0.5 * F.softplus(loser)
    return compare_responses(x, pairs, losses, rewards, nll_coef)


def bco_pair(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """BCO (2404.04656): -log σ(βr_w) - log σ(-βr_l).

    As in TRL's DPOTrainer without the paper's reward shift, a running mean over the steps: a loss keeps no state.
    """
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    winner, loser = pairs.split(rewards)
    return compare_responses(x, pairs, F.softplus(-winner) + F.softplus(loser), rewards, nll_coef)


def sppo_hard(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """SPPO (2405.00675, eq. 4.7) with probability 1 for the winner: (r_w - 1/(2β))² + (r_l + 1/(2β))²."""
    pairs, ratios = read_pairs(x), log_ratios(x)
    winner, loser = pairs.split(ratios)
    losses = (winner - 0.5 / beta).square() + (loser + 0.5 / beta).square()
    return compare_responses(x, pairs, losses, beta * ratios, nll_coef)


def apo_zero(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """APO-zero (2408.06266, eq. 7): σ(-βr_w) + σ(βr_l), for winners better than the policy's own responses."""
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    winner, loser = pairs.split(rewards)
    return compare_responses(x, pairs, torch.sigmoid(-winner) + torch.sigmoid(loser), rewards, nll_coef)


def apo_down(x: LossInput, *, beta: float = 0.1, nll_coef: float = 0.0) -> LossOutput:
    """APO-down (2408.06266, eq. 8): σ(βr_w) + σ(-z), for winners worse than the policy's own responses."""
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    winner, loser = pairs.split(rewards)
    return compare_responses(x, pairs, torch.sigmoid(winner) + torch.sigmoid(loser - winner), rewards, nll_coef)


def discopop(x: LossInput, *, beta: float = 0.1, tau: float = 0.05, nll_coef: float = 0.0) -> LossOutput:
    """DiscoPOP (2406.08414, eq. 5): (1 - m) · -log σ(z) + m e^(-z), with m = σ(z/τ)."""
    pairs, rewards = read_pairs(x), beta * log_ratios(x)
    z = pairs.difference(rewards)
    # m e^(-z) as one exponential: for z far below 0 it is a product of nothing and infinity.
    exponential = (F.logsigmoid(z / tau) - z).clamp(max=MAX_EXPONENT).exp()
    return compare_responses(x, pairs, torch.sigmoid(-z / tau) * F.softplus(-z) + exponential, rewards, nll_coef)


for _loss in (dpo, ipo, hinge, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop):
    _loss.per = "group"
    _loss.needs = lambda **_: ("ref",)
dpo.needs = lambda *, weighted, **_: ("ref", "collision") if weighted else ("ref",)


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


def aot(x: LossInput, *, beta: float = 0.1, label_smoothing: float = 0.0) -> LossOutput:
    """Sorted log π_w - log π_l against sorted log π_ref,w - log π_ref,l, by -log σ(β difference)."""
    pairs, ratios, logprobs = read_pairs(x), log_ratios(x), response_logprobs(x)
    policy, reference = (
        pairs.difference(values).sort().values for values in (logprobs, logprobs.detach() - ratios.detach())
    )
    return _transport_loss(x, pairs, policy - reference, ratios, beta, label_smoothing)


def aot_unpaired(x: LossInput, *, beta: float = 0.1, label_smoothing: float = 0.0) -> LossOutput:
    """Sorted log-ratios of the winners against sorted log-ratios of the losers."""
    pairs, ratios = read_pairs(x), log_ratios(x)
    winner, loser = (values.sort().values for values in pairs.split(ratios))
    return _transport_loss(x, pairs, winner - loser, ratios, beta, label_smoothing)


for _loss in (aot, aot_unpaired):
    _loss.per = "batch"
    _loss.needs = lambda **_: ("ref",)


def _transport_loss(
    x: LossInput, pairs: PreferencePairs, delta: Tensor, ratios: Tensor, beta: float, label_smoothing: float
) -> LossOutput:
    check_smoothing(label_smoothing)
    losses = logistic(beta * delta, label_smoothing)
    stats = compare_responses(x, pairs, losses, beta * ratios).stats
    return LossOutput((losses.sum() / max(1, len(losses)))[None], stats)


# ---- without a reference model: the policy's own log-probs are the rewards

MIN_DOUBT = 1e-6  # 1 - p is at least this: closer to 1 the odds are rounding error, and would overflow


def simpo(
    x: LossInput,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    nll_coef: float = 0.0,
) -> LossOutput:
    """-log σ(β log π_w / |w| - β log π_l / |l| - γ) (2405.14734). ``nll_coef`` makes it CPO-SimPO.

    ``alpha`` other than 0 bends the reward to (1 - p^-α)/α, where log p is the mean log-prob (AlphaPO, 2501.03884).
    """
    check_smoothing(label_smoothing)
    pairs, rewards = read_pairs(x), response_logprobs(x) / lengths(x)
    if alpha:
        rewards = -torch.expm1(-alpha * rewards) / alpha
    rewards = beta * rewards
    return compare_responses(x, pairs, logistic(pairs.difference(rewards) - gamma, label_smoothing), rewards, nll_coef)


def cpo(x: LossInput, *, beta: float = 0.1, label_smoothing: float = 0.0, nll_coef: float = 1.0) -> LossOutput:
    """-log σ(β log π_w - β log π_l) + nll_coef · NLL_w (2401.08417), sums over tokens, NLL per token."""
    check_smoothing(label_smoothing)
    pairs, rewards = read_pairs(x), beta * response_logprobs(x)
    return compare_responses(x, pairs, logistic(pairs.difference(rewards), label_smoothing), rewards, nll_coef)


def orpo(x: LossInput, *, beta: float = 0.1) -> LossOutput:
    """NLL_w - β log σ(log odds_w - log odds_l) (2403.07691); β is the paper's λ.

    odds = p / (1 - p), where log p is the *mean* log-prob of a response's tokens; NLL_w is -log p of the winner. p is
    clamped to 1 - 1e-6, where the gradient of its odds is 0.
    """
    pairs, means = read_pairs(x), response_logprobs(x) / lengths(x)
    clamped = means.clamp(max=-MIN_DOUBT)
    log_odds = pairs.difference(clamped - torch.log(-torch.expm1(clamped)))  # log(p / (1 - p)) of p = e^mean
    result = compare_responses(x, pairs, beta * F.softplus(-log_odds), beta * means, nll_coef=1.0)
    return LossOutput(result.value, result.stats | {"log_odds": Stat.of(log_odds)})


for _loss in (simpo, cpo, orpo):
    _loss.per = "group"


# ---- unpaired feedback: each response is desirable (`preference` 1) or not (0). It is compared with a reference point,
# not with another response. One value per sequence.


def kto(
    x: LossInput, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> LossOutput:
    """KTO (2402.01306): λ_D σ(-β(r - z0)) for desirable responses, λ_U σ(-β(z0 - r)) for undesirable ones.

    z0 is the column `reference_point`, in nats, without gradient: max(0, mean r of mismatched prompts and responses)
    over the whole batch, not over a micro-batch. λ_D and λ_U are the weights; with n_D and n_U responses of each kind,
    the authors advise λ_D n_D / (λ_U n_U) between 1 and 4/3. A batch may lack one kind.
    """
    point = x.require_column("reference_point")
    result = _compute_unpaired_loss(x, point, beta, desirable_weight, undesirable_weight)
    return LossOutput(result.value, result.stats | {"kl": Stat.of(point)})


def apo_zero_unpaired(
    x: LossInput, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> LossOutput:
    """KTO with 0 as the reference point (APO-zero, 2408.06266, without pairs)."""
    return _compute_unpaired_loss(x, torch.zeros(x.sequences), beta, desirable_weight, undesirable_weight)


for _loss in (kto, apo_zero_unpaired):
    _loss.per = "sequence"
    _loss.needs = lambda **_: ("ref",)


def _compute_unpaired_loss(
    x: LossInput, point: Tensor, beta: float, desirable_weight: float, undesirable_weight: float
) -> LossOutput:
    desirable = _read_desirable(x.require_column("preference"))
    ratios = log_ratios(x)
    sign = torch.where(desirable, 1.0, -1.0)
    gain = sign * beta * (ratios - point.to(ratios))
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    rewards, logprobs = beta * ratios.detach(), response_logprobs(x).detach()
    stats: Stats = {
        "rewards/chosen": Stat.of(rewards, desirable),
        "rewards/rejected": Stat.of(rewards, ~desirable),
        "logps/chosen": Stat.of(logprobs, desirable),
        "logps/rejected": Stat.of(logprobs, ~desirable),
        "accuracy": accuracy(gain.detach()),  # the share on the right side of the reference point
    }
    return LossOutput(weight * torch.sigmoid(-gain), stats)


def _read_desirable(preference: Tensor) -> Tensor:
    wrong = (preference != 0) & (preference != 1)
    if bool(wrong.any()):
        raise ValueError(
            f"column `preference` holds {preference[wrong][0].item():g}: this loss judges each response by itself, as "
            "1 (desirable) or 0 (undesirable); rankings are for pairwise losses such as dpo"
        )
    return preference == 1
