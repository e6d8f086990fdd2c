"""Process reward models: a language model that judges each step of a solution."""

from __future__ import annotations

import torch.nn.functional as F

from coalign.algorithms.losses.comparison import accuracy
from coalign.algorithms.traits import column, read
from coalign.types import LossInput, LossOutput, Stat


def process_reward(x: LossInput) -> LossOutput:
    """Cross entropy of P(+) with the column `label` at each judged position (2305.20050, 2312.08935).

    P(+) is the softmax over two tokens only: the column `candidates` [T, 2] holds the ids of + and of -. A label is the
    probability that the step is right: 1 or 0 (hard), or any number between (soft; then the least value is the label's
    own entropy). Reads candidate_logprobs. ValueError for another number of candidates, or a label outside of [0, 1].

    Statistics: `accuracy` (P(+) on the label's side of ½; half right on ½), `nll`, and `positive`, the mean P(+).
    """
    logprobs, label = read(x, "candidate_logprobs").double(), column(x, "label").double()
    if logprobs.shape[1] != 2:
        raise ValueError(
            f"process_reward compares 2 candidates, + and -; the column `candidates` has {logprobs.shape[1]}"
        )
    if bool(((label < 0) | (label > 1)).any()):
        worst = label[(label - 0.5).abs().argmax()].item()
        raise ValueError(f"column `label` holds {worst:g}: a label is the probability that the step is right, 0 to 1")
    z = logprobs[:, 0] - logprobs[:, 1]
    nll = label * F.softplus(-z) + (1 - label) * F.softplus(z)
    stats = {
        "nll": Stat.of(nll),
        "accuracy": accuracy((z * (label - 0.5)).detach()),
        "positive": Stat.of(z.detach().sigmoid()),
    }
    return LossOutput(nll, stats)


process_reward.needs = lambda **_: ("candidate_logprobs",)
