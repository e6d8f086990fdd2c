"""Losses of unpaired feedback: each response is desirable or not, relative to a reference point instead of another one.

r is the log-ratio log π - log π_ref of a response, summed over its tokens. The column `preference` is 1 for desirable
and 0 for undesirable responses. One value per sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coalign.algorithms.losses.comparison import accuracy, log_ratios, response_logprobs
from coalign.algorithms.traits import require_column
from coalign.types import LossInput, LossOutput, Stat, Stats


def kto(
    x: LossInput, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> LossOutput:
    """KTO (2402.01306): λ_D σ(-β(r - z0)) for desirable responses, λ_U σ(-β(z0 - r)) for undesirable ones.

    z0 is the column `reference_point`, in nats, without gradient: max(0, mean r of mismatched prompts and responses)
    over the whole batch, not over a micro-batch. λ_D and λ_U are the weights; with n_D and n_U responses of each kind,
    the authors advise λ_D n_D / (λ_U n_U) between 1 and 4/3. A batch may lack one kind.
    """
    point = require_column(x, "reference_point")
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
    desirable = _read_desirable(require_column(x, "preference"))
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
        "accuracy": accuracy(
            gain.detach()
        ),  # the share on the right side of the reference point; exactly on it counts half
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
