"""Tokens whose log-prob and advantage rise together: raising their probability is what lowers the entropy (2505.22617).

Functions of the section `covariance`, which take columns of the whole rollout after its advantages. The covariance of
a token is (log π - its mean)(A - its mean), both means over all trained tokens of the rollout, and π is the policy
that sampled. So tokens are chosen once for each rollout: the choice does not depend on micro-batches, updates, ranks,
packing, or the order in which samples arrived. The authors, verl and SkyRL choose again in every micro-batch, with the
current policy and the means of that micro-batch: their choice depends on how a batch is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coalign.types import Stat

__all__ = ["clip_cov", "kl_cov"]  # what `covariance.fn` can name


def clip_cov(
    advantages: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    group: Tensor,
    index: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> dict[str, Any]:
    """Clip-Cov: some tokens with a covariance above ``low`` and below ``high`` get the advantage 0, and no gradient.

    They are drawn at random, ``share`` of all trained tokens but at least one, or all that there are. They still count
    in the denominators of the loss.
    """
    if not low < high:
        raise ValueError(f"covariance.low is {low} and covariance.high {high}: expected low < high")
    order, covariance = _measure_covariance(advantages, rollout_logprobs, loss_mask, segment, group, index)
    eligible = order[(covariance > low) & (covariance < high)]
    # Groups are numbered through the run: each rollout has its own draws, and a repeated run has the same draws.
    seed = int(group.min()) if len(group) else 0
    draw = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(seed))
    chosen = eligible[draw[: count_tokens(share, len(order))].to(eligible.device)]
    return {"advantages": advantages.index_fill(0, chosen, 0.0), **_describe(covariance, chosen)}


def kl_cov(
    advantages: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    segment: Tensor,
    group: Tensor,
    index: Tensor,
    *,
    share: float = 2e-3,
) -> dict[str, Any]:
    """KL-Cov: marks the ``share`` of tokens (at least one) with the highest covariance, for the loss `kl_cov`.

    The column `high_covariance` bool[T]. Among equals the first of the first sample of the first group is taken.
    """
    order, covariance = _measure_covariance(advantages, rollout_logprobs, loss_mask, segment, group, index)
    highest = covariance.argsort(descending=True, stable=True)[: count_tokens(share, len(order))]
    marked = torch.zeros_like(loss_mask).index_fill(0, order[highest], True)
    return {"high_covariance": marked, **_describe(covariance, highest)}


def _measure_covariance(
    advantages: Tensor, logprobs: Tensor, loss_mask: Tensor, segment: Tensor, group: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """The trained tokens i64[K], ordered by group, index and position, and the covariance f64[K] of each."""
    samples = sorted(range(len(group)), key=lambda i: (int(group[i]), int(index[i])))
    rank = torch.empty_like(group, dtype=torch.int64)
    rank[torch.tensor(samples, dtype=torch.int64, device=group.device)] = torch.arange(len(group), device=group.device)
    trained = loss_mask.nonzero().flatten()
    order = trained[rank[segment[trained]].argsort(stable=True)]
    a, logprob = advantages[order].double(), logprobs[order].double()
    return order, (a - a.mean()) * (logprob - logprob.mean())


def count_tokens(share: float, tokens: int) -> int:
    """``share`` of the tokens, rounded down, but at least one. ValueError for a share outside of 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"covariance.share is {share}: expected a share of the trained tokens, from 0 to 1")
    return max(1, int(share * tokens))


def _describe(covariance: Tensor, chosen: Tensor) -> dict[str, Stat]:
    return {"covariance/mean": Stat.of(covariance), "covariance/chosen": Stat(float(len(chosen)), len(covariance))}
