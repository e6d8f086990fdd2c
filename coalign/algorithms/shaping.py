"""What happens to rewards between the function or model that gives them and the advantages.

Flow functions: positional arguments are columns, token columns [T] over all tokens, sequence columns [N].
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from coalign.algorithms.kl import estimate_kl
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import Stat, Status, Total


def shape_reward(
    reward: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    turn_rewards: Tensor | None = None,
    *,
    kl_coef: float,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    clip: float | None = None,
) -> dict[str, Any]:
    """token_rewards f32[T]: -kl_coef · kl_t at every trained token, plus the reward at the last one (2203.02155), plus
    ``turn_rewards``, where there are any, at the trained tokens that they stand at.

    The divergence is that of the policy which sampled, so it is measured with the sampler's log-probs: under that
    policy k1 is unbiased, and the trainer need not run before the batch is complete. ``clip`` bounds the reward to
    ±clip before anything is subtracted from it. A sequence without a trained token has nowhere to put its reward: all
    its token rewards are 0.

    Metrics: ``kl`` in nats per response (what AdaptiveKL steers by), ``kl_per_token``.
    """
    trained, sequences = segment[loss_mask], len(reward)
    kl = estimate_kl(rollout_logprobs[loss_mask], ref_logprobs[loss_mask], estimator)
    token_rewards = torch.zeros_like(rollout_logprobs)
    token_rewards[loss_mask] = -kl_coef * kl
    if turn_rewards is not None:
        token_rewards[loss_mask] += turn_rewards[loss_mask]
    score = reward if clip is None else reward.clamp(-clip, clip)
    counts = segment_count(trained, sequences)
    last = loss_mask.nonzero().flatten()[counts.cumsum(0)[counts > 0] - 1]
    token_rewards[last] += score[counts > 0].to(token_rewards.dtype)
    per_response = segment_sum(kl, trained, sequences)
    return {"token_rewards": token_rewards, "kl": Stat.of(per_response, counts > 0), "kl_per_token": Stat.of(kl)}


def sequence_kl_reward(
    reward: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    kl_coef: float,
) -> dict[str, Any]:
    """reward f32[N]: less ``kl_coef`` · (log π - log π_ref of the whole response), the k1 estimate summed over it.

    So the divergence is part of what a baseline is taken of, as in RLOO (2402.14740). The log-probs are the sampler's,
    and the metrics those of shape_reward.
    """
    trained, sequences = segment[loss_mask], len(reward)
    kl = estimate_kl(rollout_logprobs[loss_mask], ref_logprobs[loss_mask], "k1")
    per_response = segment_sum(kl.double(), trained, sequences)
    some = segment_count(trained, sequences) > 0
    return {
        "reward": (reward - kl_coef * per_response).float(),
        "kl": Stat.of(per_response, some),
        "kl_per_token": Stat.of(kl),
    }


def scale_reward(reward: Tensor, *, mean: float = 0.0, std: float = 1.0, clip: float | None = None) -> dict[str, Any]:
    """reward f32[N]: (reward - mean) / std, then held within ±clip. ``std`` below 1e-6 counts as 1e-6.

    ``mean`` and ``std`` are somebody else's, who keeps them from step to step; ValueError if they are not finite.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"rewards cannot be scaled by mean={mean}, std={std}: both must be finite, std at least 0")
    scaled = (reward.double() - mean) / max(std, 1e-6)
    bounded = scaled if clip is None else scaled.clamp(-clip, clip)
    return {"reward": bounded.float(), "reward/clip_fraction": Stat.of(bounded != scaled)}


def scale_truncated(reward: Tensor, status: Tensor, *, factor: float = 1.0, offset: float = 0.0) -> dict[str, Any]:
    """reward f32[N]: factor · reward + offset of the responses that were cut short, the others as they are.

    ProRL v2 scales what a response without an end may earn, by 0 to 1; ``factor`` 0 and a negative ``offset`` give each
    of them that.
    """
    return {"reward": torch.where(status == int(Status.TRUNCATED), factor * reward + offset, reward)}


def mask_truncated(loss_mask: Tensor, status: Tensor, segment: Tensor) -> dict[str, Any]:
    """loss_mask bool[T]: without the responses that were cut short (DAPO's overlong filtering, 2503.14476).

    Their rewards still enter the baseline of their group; they count in no denominator of the loss.
    """
    cut = status == int(Status.TRUNCATED)
    return {"loss_mask": loss_mask & ~cut[segment], "samples/masked": Total(float(cut.sum()))}
