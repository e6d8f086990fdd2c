"""Preference losses without a reference model: the policy's own log-probs are the rewards.

Each reads logprobs and the column `preference`, and gives one value per group: the mean over its pairs of a better
response w and a worse one l.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.algorithms.comparisons import read_pairs
from coalign.algorithms.losses.comparison import (
    check_smoothing,
    compare_responses,
    lengths,
    logistic,
    response_logprobs,
)
from coalign.types import LossInput, LossOutput, Stat

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
    log_odds = pairs.difference(_log_odds(means))
    result = compare_responses(x, pairs, beta * F.softplus(-log_odds), beta * means, nll_coef=1.0)
    return LossOutput(result.value, result.stats | {"log_odds": Stat.of(log_odds)})


for _loss in (simpo, cpo, orpo):
    _loss.per = "group"


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = e^logprobs."""
    clamped = logprobs.clamp(max=-MIN_DOUBT)
    return clamped - torch.log(-torch.expm1(clamped))
