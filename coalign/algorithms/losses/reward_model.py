"""Losses of reward models, from comparisons, and of process reward models, which judge each step of a solution."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from coalign.algorithms.comparisons import read_pairs
from coalign.algorithms.losses.comparison import accuracy, logistic, reward_stats
from coalign.algorithms.traits import require_column, require_input
from coalign.types import LossInput, LossOutput, Stat, Stats


def bradley_terry(x: LossInput, *, centre_coef: float = 0.0) -> LossOutput:
    """-log σ(s_w - s_l - margin), one value per group: the mean over its pairs (2203.02155 for k > 2 responses).

    Computed by softplus, which cannot overflow. ``margin`` is the pair's difference in the column `margin`, if the
    batch has one (2307.09288). ``centre_coef`` adds that much of (s_w + s_l)², which keeps scores around 0
    (2312.09244).

    Reads scores and the column `preference`. Statistics over pairs: `accuracy` (ties count half), `margin`,
    `rewards/chosen`, `rewards/rejected`. Over responses: `scores` and `scores_squared`, which give mean and variance.
    """
    pairs, scores = read_pairs(x), require_input(x, "scores").double()
    z = pairs.difference(scores)
    if "margin" in x.columns:
        z = z - pairs.difference(x.columns["margin"])
    losses = logistic(z)
    if centre_coef:
        losses = losses + centre_coef * torch.stack(pairs.split(scores)).sum(0).square()
    stats = {"scores": Stat.of(scores), "scores_squared": Stat.of(scores.square())}
    return LossOutput(pairs.mean(losses), stats | reward_stats(pairs, scores.detach()))


bradley_terry.per = "group"


def process_reward(x: LossInput) -> LossOutput:
    """Cross entropy of P(+) with the column `label` at each judged position (2305.20050, 2312.08935).

    P(+) is the softmax over two tokens only: the column `candidates` [T, 2] holds the ids of + and -. A label is the
    probability that the step is right: 1 or 0 (hard), or between (soft; the minimum of the loss is then the label's own
    entropy). Reads candidate_logprobs. ValueError for another number of candidates, or a label outside of [0, 1].

    Statistics: `accuracy` (P(+) on the label's side of ½; exactly ½ counts half), `nll`, and `positive`, the mean P(+).
    """
    logprobs, label = require_input(x, "candidate_logprobs").double(), require_column(x, "label").double()
    if logprobs.shape[1] != 2:
        raise ValueError(
            f"process_reward compares 2 candidates, + and -; the column `candidates` has {logprobs.shape[1]}"
        )
    if bool(((label < 0) | (label > 1)).any()):
        worst = label[(label - 0.5).abs().argmax()].item()
        raise ValueError(f"column `label` holds {worst:g}: a label is the probability that the step is right, 0 to 1")
    z = logprobs[:, 0] - logprobs[:, 1]
    nll = label * F.softplus(-z) + (1 - label) * F.softplus(z)
    stats: Stats = {
        "nll": Stat.of(nll),
        "accuracy": accuracy((z * (label - 0.5)).detach()),
        "positive": Stat.of(z.detach().sigmoid()),
    }
    return LossOutput(nll, stats)


process_reward.needs = lambda **_: ("candidate_logprobs",)
