"""Supervised losses: language modelling, and distillation from a teacher's log-probs of K candidates per position.

In distillation all tokens but the K candidates form one more event, the tail, with the remaining probability. With
K = V the divergence is exact. With fewer it is a lower bound (merging events never raises an f-divergence), which still
tells the student how much probability the candidates have together.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from coalign.algorithms.traits import require_column, require_input
from coalign.types import LossInput, LossOutput, Stat, Stats


def sft(x: LossInput) -> LossOutput:
    """Negative log-likelihood of each trained token, in nats. Reads logprobs."""
    nll = -require_input(x, "logprobs")
    return LossOutput(nll, {"nll": Stat.of(nll)})


MIN_TAIL = 1e-6  # a smaller tail is the rounding error of 1 - Σp in float32, of either sign


def distillation(
    x: LossInput,
    *,
    divergence: Literal["forward", "reverse", "jsd"] = "forward",
    kd_coef: float = 1.0,
    jsd_beta: float = 0.5,
) -> LossOutput:
    """(1 - k) NLL + k D(teacher, student) per token, k = ``kd_coef``.

    - `forward`: KL(teacher ‖ student); the cross entropy of 1503.02531 less the teacher's entropy, a constant.
    - `reverse`: KL(student ‖ teacher) (MiniLLM, 2306.08543).
    - `jsd`: β KL(teacher ‖ m) + (1 - β) KL(student ‖ m), m = β teacher + (1 - β) student, β = ``jsd_beta`` strictly
      between 0 and 1 (GKD, 2306.13649).

    Reads candidate_logprobs [T, K] and the column `teacher_logprobs` [T, K], logprobs for the NLL.
    """
    if not 0 <= kd_coef <= 1:
        raise ValueError(f"loss.kd_coef is {kd_coef}: it is the share of distillation, from 0 to 1")
    if divergence == "jsd" and not 0 < jsd_beta < 1:
        raise ValueError(f"loss.jsd_beta is {jsd_beta}: it lies between 0 and 1 (`forward` and `reverse` are its ends)")
    student = append_tail(require_input(x, "candidate_logprobs"))
    teacher = append_tail(require_column(x, "teacher_logprobs").to(student.device))
    distance = _divergence(teacher, student, divergence, jsd_beta)
    nll = -require_input(x, "logprobs")
    stats: Stats = {"kd": Stat.of(distance), "nll": Stat.of(nll), "teacher_tail": Stat.of(teacher[:, -1].exp())}
    return LossOutput((1 - kd_coef) * nll + kd_coef * distance, stats)


distillation.needs = lambda **_: ("candidate_logprobs",)


def append_tail(logprobs: Tensor) -> Tensor:
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
