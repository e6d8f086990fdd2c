"""Losses and statistics of routers, which choose the experts of each token: pure functions.

The tokens of an update, over all micro-batches and ranks, are one set. So, as with every other loss here, the gradient
does not depend on how a batch is cut. ``weights`` says how often a token counts: a prompt that several responses share
is computed once and counts for each of them; padding counts 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coalign.types import Stat, Stats


def count_choices(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Count the tokens of each expert: f64[E], from the ``chosen`` experts i64[T, k] and ``weights`` [T]."""
    spread = weights.double()[:, None].expand(chosen.shape)
    return spread.new_zeros(experts).scatter_add_(0, chosen.flatten(), spread.flatten())


def balance_loss(logits: Tensor, weights: Tensor, counts: Tensor, tokens: float) -> Tensor:
    """Return these tokens' part of the load-balancing loss of one layer (2101.03961, eq. 4 to 6; as in transformers).

    E · Σ_e f_e P_e: f_e is the share of all tokens that chose expert e (k in sum), P_e the mean probability of e.
    ``logits`` [T, E]. ``counts`` f64[E] and ``tokens`` (their number) are those of the whole update (2501.11873), so
    the parts of all micro-batches and ranks add up to the loss. It is k where all experts are chosen equally often.
    """
    shares = (counts / tokens).to(torch.float32)
    means = (logits.float().softmax(-1) * weights[:, None]).sum(0) / tokens
    return logits.shape[1] * (shares * means).sum()


def z_loss(logits: Tensor, weights: Tensor, tokens: float) -> Tensor:
    """Return these tokens' part of the mean of log(Σ_e exp(logit_e))² (2202.08906, eq. 5), which keeps logits small."""
    return (logits.float().logsumexp(-1).square() * weights).sum() / tokens


def describe_load(counts: Tensor) -> Stats:
    """Describe how tokens spread over experts: means over the layers. ``counts`` f64[L, E] of an update.

    router/max_load: tokens of the busiest expert, in units of an even share. router/entropy: of the load, 1 where it is
    even and 0 where one expert has all. router/dead_experts: the share of experts that no token chose.
    """
    shares = counts / counts.sum(1, keepdim=True)
    experts = counts.shape[1]
    entropy = -torch.special.xlogy(shares, shares).sum(1) / torch.tensor(experts).double().log()
    return {
        "router/max_load": Stat(float(shares.amax(1).mean() * experts)),
        "router/entropy": Stat(float(entropy.mean())),
        "router/dead_experts": Stat(float((counts == 0).double().mean())),
    }
