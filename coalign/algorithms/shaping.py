"""Shapes rewards between the function or model that gives them and the advantages.

Flow functions: positional arguments are columns, token columns [T] over all tokens, sequence columns [N].
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coalign.algorithms.divergence import estimate_kl
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import Stat, Status, Total

__all__ = ["mask_truncated", "scale_truncated"]  # what `truncated.fn` can name


def shape_reward(
    reward: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    ref_logprobs: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    *,
    kl_coef: float,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    turn_weight: float = 0.0,
) -> dict[str, Any]:
    """token_rewards f32[T]: -kl_coef · kl_t at every trained token, plus the reward at the last one (2203.02155).

    ``turn_weight`` times ``turn_rewards`` (from an environment, and part of the reward) is placed at the ends of the
    turns, and only the rest of the reward at the last token. So the weight does not change a response's total.

    The divergence is measured with the sampler's log-probs: under that policy k1 is unbiased, and the trainer need not
    run before the batch is complete. A sequence without a trained token has only zeros.

    Metrics: ``kl`` in nats per response (the input of AdaptiveKL) and ``kl_per_token``. Without ``ref_logprobs`` there
    are none, and a ``kl_coef`` other than 0 is a ValueError.
    """
    trained, sequences = segment[loss_mask], len(reward)
    token_rewards, stats = torch.zeros_like(rollout_logprobs), dict[str, Stat]()
    counts = segment_count(trained, sequences)
    if ref_logprobs is not None:
        kl = estimate_kl(rollout_logprobs[loss_mask], ref_logprobs[loss_mask], estimator)
        token_rewards[loss_mask] = -kl_coef * kl
        stats = {"kl": Stat.of(segment_sum(kl, trained, sequences), counts > 0), "kl_per_token": Stat.of(kl)}
    elif kl_coef:
        raise ValueError(f"kl_coef is {kl_coef}, but the batch has no column `ref_logprobs`: run a reference")
    rest = reward.double()
    if turn_rewards is not None:
        weighted = turn_weight * turn_rewards[loss_mask]
        token_rewards[loss_mask] += weighted
        rest = rest - segment_sum(weighted.double(), trained, sequences)
    last = loss_mask.nonzero().flatten()[counts.cumsum(0)[counts > 0] - 1]
    token_rewards[last] += rest[counts > 0].to(token_rewards.dtype)
    return {"token_rewards": token_rewards, **stats}


def sequence_kl_reward(
    reward: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    kl_coef: float,
) -> dict[str, Any]:
    """reward f32[N] minus ``kl_coef`` · (log π - log π_ref of the whole response), the k1 estimate summed over it.

    So baselines include the divergence, as in RLOO (2402.14740). The log-probs are the sampler's, and the metrics those
    of shape_reward.
    """
    trained, sequences = segment[loss_mask], len(reward)
    kl = estimate_kl(rollout_logprobs[loss_mask], ref_logprobs[loss_mask], "k1")
    per_response = segment_sum(kl.double(), trained, sequences)
    stats = {"kl": Stat.of(per_response, segment_count(trained, sequences) > 0), "kl_per_token": Stat.of(kl)}
    return {"reward": (reward - kl_coef * per_response).float(), **stats}


def scale_truncated(reward: Tensor, status: Tensor, *, factor: float = 1.0, offset: float = 0.0) -> dict[str, Any]:
    """reward f32[N]: factor · reward + offset for truncated responses, the others unchanged.

    ProRL v2 scales the reward of a truncated response by 0 to 1; with ``factor`` 0, each gets ``offset``.
    """
    return {"reward": torch.where(status == int(Status.TRUNCATED), factor * reward + offset, reward)}


def mask_truncated(loss_mask: Tensor, status: Tensor, segment: Tensor) -> dict[str, Any]:
    """loss_mask bool[T] without truncated responses (DAPO's overlong filtering, 2503.14476).

    Their rewards still enter the baseline of their group; they count in no denominator of the loss.
    """
    cut = status == int(Status.TRUNCATED)
    return {"loss_mask": loss_mask & ~cut[segment], "samples/masked": Total(float(cut.sum()))}
