"""Supervised losses: language modelling, distillation from a teacher's log-probs of K candidates, reward models.

In distillation all tokens but the K candidates form one more event, the tail, with the remaining probability. With
K = V the divergence is exact. With fewer it is a lower bound (merging events never raises an f-divergence), which still
tells the student how much probability the candidates have together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.algorithms.comparisons import accuracy, logistic, read_pairs, reward_stats
from coalign.algorithms.objective import Loss
from coalign.types import LossInput, LossOutput, Stat, Stats


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTLoss(Loss):
    """Negative log-likelihood of each trained token, in nats. Reads logprobs."""

    def __call__(self, x: LossInput) -> LossOutput:
        nll = -x.require("logprobs")
        return LossOutput(nll, {"nll": Stat.of(nll)})


MIN_TAIL = 1e-6  # a smaller tail is the rounding error of 1 - Σp in float32, of either sign


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLoss(Loss):
    """(1 - k) NLL + k D(teacher, student) per token, k = ``kd_coef``.

    - `forward`: KL(teacher ‖ student); the cross entropy of 1503.02531 less the teacher's entropy, a constant.
    - `reverse`: KL(student ‖ teacher) (MiniLLM, 2306.08543).
    - `jsd`: β KL(teacher ‖ m) + (1 - β) KL(student ‖ m), m = β teacher + (1 - β) student, β = ``jsd_beta`` strictly
      between 0 and 1 (GKD, 2306.13649).

    Reads candidate_logprobs [T, K] and the column `teacher_logprobs` [T, K], logprobs for the NLL.
    """

    needs = ("candidate_logprobs",)
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    kd_coef: float = 1.0
    jsd_beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.kd_coef <= 1:
            self.refuse("it is the share of distillation, from 0 to 1", "kd_coef")
        if self.divergence == "jsd" and not 0 < self.jsd_beta < 1:
            self.refuse("it lies between 0 and 1 (`forward` and `reverse` are its ends)", "jsd_beta")

    def __call__(self, x: LossInput) -> LossOutput:
        student = _append_tail(x.require("candidate_logprobs"))
        teacher = _append_tail(x.require_column("teacher_logprobs").to(student.device))
        distance = _divergence(teacher, student, self.divergence, self.jsd_beta)
        nll = -x.require("logprobs")
        stats: Stats = {"kd": Stat.of(distance), "nll": Stat.of(nll), "teacher_tail": Stat.of(teacher[:, -1].exp())}
        return LossOutput((1 - self.kd_coef) * nll + self.kd_coef * distance, stats)


def _append_tail(logprobs: Tensor) -> Tensor:
    """f64[T, K + 1]: log-probs [T, K] of some events and of all others together, which is at least log 1e-6."""
    logprobs = logprobs.double()
    rest = -torch.expm1(logprobs.logsumexp(1, keepdim=True))
    return torch.cat([logprobs, rest.clamp(min=MIN_TAIL).log()], 1)


def _divergence(teacher: Tensor, student: Tensor, name: str, beta: float) -> Tensor:
    if name == "forward":
        return _kl(teacher, student)
    if name == "reverse":
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(1)


# ---- reward models, from comparisons, and process reward models, which judge each step of a solution


@dataclass(frozen=True, kw_only=True, slots=True)
class BradleyTerryLoss(Loss):
    """-log σ(s_w - s_l - margin), one value per group: the mean over its pairs (2203.02155 for k > 2 responses).

    Computed by softplus, which cannot overflow. ``margin`` is the pair's difference in the column `margin`, if the
    batch has one (2307.09288). ``centre_coef`` adds that much of (s_w + s_l)², which keeps scores around 0
    (2312.09244).

    Reads scores and the column `preference`. Statistics over pairs: `accuracy` (ties count half), `margin`,
    `rewards/chosen`, `rewards/rejected`. Over responses: `scores` and `scores_squared`, which give mean and variance.
    """

    per = "group"
    centre_coef: float = 0.0

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, scores = read_pairs(x), x.require("scores").double()
        z = pairs.difference(scores)
        if "margin" in x.columns:
            z = z - pairs.difference(x.columns["margin"])
        losses = logistic(z)
        if self.centre_coef:
            losses = losses + self.centre_coef * torch.stack(pairs.split(scores)).sum(0).square()
        stats = {"scores": Stat.of(scores), "scores_squared": Stat.of(scores.square())}
        return LossOutput(pairs.mean(losses), stats | reward_stats(pairs, scores.detach()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRewardLoss(Loss):
    """Cross entropy of P(+) with the column `label` at each judged position (2305.20050, 2312.08935).

    P(+) is the softmax over two tokens only: the column `candidates` [T, 2] holds the ids of + and -. A label is the
    probability that the step is right: 1 or 0 (hard), or between (soft; the minimum of the loss is then the label's own
    entropy). Reads candidate_logprobs. ValueError for another number of candidates, or a label outside of [0, 1].

    Statistics: `accuracy` (P(+) on the label's side of ½; exactly ½ counts half), `nll`, and `positive`, the mean P(+).
    """

    needs = ("candidate_logprobs",)

    def __call__(self, x: LossInput) -> LossOutput:
        logprobs, label = x.require("candidate_logprobs").double(), x.require_column("label").double()
        if (count := logprobs.shape[1]) != 2:
            raise ValueError(f"process_reward compares 2 candidates, + and -; the column `candidates` has {count}")
        if bool(((label < 0) | (label > 1)).any()):
            worst = label[(label - 0.5).abs().argmax()].item()
            raise ValueError(
                f"column `label` holds {worst:g}: a label is the probability that the step is right, 0 to 1"
            )
        z = logprobs[:, 0] - logprobs[:, 1]
        nll = label * F.softplus(-z) + (1 - label) * F.softplus(z)
        stats: Stats = {
            "nll": Stat.of(nll),
            "accuracy": accuracy((z * (label - 0.5)).detach()),
            "positive": Stat.of(z.detach().sigmoid()),
        }
        return LossOutput(nll, stats)
