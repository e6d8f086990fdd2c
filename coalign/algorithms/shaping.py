"""From one reward per response to a reward per token, with the divergence from the reference as a cost."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from coalign.algorithms.kl import estimate_kl
from coalign.algorithms.segments import segment_count, segment_sum
from coalign.types import Stat


def shape_reward(
    reward: Tensor,
    rollout_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    *,
    kl_coef: float,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    clip: float | None = None,
) -> dict[str, Any]:
    """token_rewards f32[T]: -kl_coef · kl_t at every trained token, plus the reward at the last one (2203.02155).

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
    score = reward if clip is None else reward.clamp(-clip, clip)
    counts = segment_count(trained, sequences)
    last = loss_mask.nonzero().flatten()[counts.cumsum(0)[counts > 0] - 1]
    token_rewards[last] += score[counts > 0].to(token_rewards.dtype)
    per_response = segment_sum(kl, trained, sequences)
    return {"token_rewards": token_rewards, "kl": Stat.of(per_response, counts > 0), "kl_per_token": Stat.of(kl)}
