"""What the preference losses share: sums over responses, and the comparison of the responses of a group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.algorithms.comparisons import PreferencePairs
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.algorithms.traits import require_input
from coalign.types import LossInput, LossOutput, Stat, Stats

# Sums over a response, and all that follows, run in float64: N numbers cost nothing, and a log-ratio is a small
# difference of large sums.


def response_logprobs(x: LossInput) -> Tensor:
    """f64[N]: log π(response | prompt), summed over the trained tokens."""
    return segment_sum(require_input(x, "logprobs").double(), x.segment, x.sequences)


def log_ratios(x: LossInput) -> Tensor:
    """f64[N]: log π - log π_ref of each response, summed over the trained tokens."""
    return segment_sum(token_log_ratios(x), x.segment, x.sequences)


def token_log_ratios(x: LossInput) -> Tensor:
    """f64[T]: log π - log π_ref."""
    return require_input(x, "logprobs").double() - require_input(x, "ref").double()


def lengths(x: LossInput) -> Tensor:
    """f64[N]: trained tokens of each response, at least 1, for divisions."""
    return segment_count(x.segment, x.sequences).clamp(min=1).double()


def logistic(z: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - ε) log σ(z) - ε log σ(-z), for labels that are wrong with probability ε."""
    loss = F.softplus(-z)
    return loss if label_smoothing == 0 else (1 - label_smoothing) * loss + label_smoothing * F.softplus(z)


def check_smoothing(label_smoothing: float, *, least: float = 0.0) -> None:
    """Raise ValueError unless it is a probability from ``least`` to below one half."""
    if not least <= label_smoothing < 0.5:
        raise ValueError(
            f"loss.label_smoothing is {label_smoothing}: it is the share of wrong labels, from {least} to below 0.5"
        )


def compare_responses(
    x: LossInput, pairs: PreferencePairs, losses: Tensor, rewards: Tensor, nll_coef: float = 0.0
) -> LossOutput:
    """One value per group: the mean of ``losses`` [P] over its pairs, with statistics of the implicit ``rewards`` [N].

    ``nll_coef`` adds that much of the winner's negative log-likelihood, the mean over its own tokens (RPO, 2404.19733).
    """
    logprobs = response_logprobs(x)
    stats = {**reward_stats(pairs, rewards.detach()), **chosen_rejected("logps", pairs, logprobs.detach())}
    if nll_coef:
        nll = -(logprobs / lengths(x))[pairs.winner]
        losses = losses + nll_coef * nll
        stats["nll"] = Stat.of(nll)
    return LossOutput(pairs.mean(losses), stats)


def reward_stats(pairs: PreferencePairs, rewards: Tensor) -> Stats:
    """Means over pairs. ``accuracy`` is the share of pairs in which the winner has the greater reward.

    A tie counts half, so a policy equal to its reference is at chance.
    """
    margin = pairs.difference(rewards)
    return {
        **chosen_rejected("rewards", pairs, rewards),
        "accuracy": accuracy(margin),
        "margin": Stat.of(margin),
    }


def accuracy(margin: Tensor) -> Stat:
    """The share of ``margin`` above 0; 0 itself counts half."""
    return Stat.of(torch.heaviside(margin, margin.new_tensor(0.5)))


def chosen_rejected(name: str, pairs: PreferencePairs, values: Tensor) -> Stats:
    """The means of ``values`` [N] over winners and over losers."""
    winner, loser = pairs.split(values)
    return {f"{name}/chosen": Stat.of(winner), f"{name}/rejected": Stat.of(loser)}
