"""Log-probs of several candidate tokens per position, and the collision probability, straight from hidden states.

Distillation reads the log-probs of a teacher's likeliest tokens, process rewards those of + and -. The logits of a
block of positions exist only while it is computed, forward and once more backward.

The vocabulary may be sharded over ranks: each computes the logits of its own tokens, and the results are combined.
Every rank then has the same result and the same gradient of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The tokens of this rank of ``group``: from ``first`` on, one for each row of its weight (at least one).

    ``size`` is the number of tokens on all ranks.
    """

    group: dist.ProcessGroup
    first: int
    size: int

    def max(self, x: Tensor) -> Tensor:
        """The element-wise maximum over the ranks."""
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The element-wise sum over the ranks. Differentiable: each rank takes the gradient as it is."""
        return _Sum.apply(x, self.group)

    def logsumexp(self, x: Tensor) -> Tensor:
        """The log-sum-exp [M] over the ranks, of theirs. Differentiable, like ``sum``."""
        top = self.max(x.detach())
        return self.sum((x - top).exp()).log() + top

    def gather_all(self, x: Tensor) -> Tensor:
        """Gather [M, k] from each of n ranks into [M, n · k]."""
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, 1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


BLOCK = {"cpu": 2**22, "cuda": 2**26}  # logits held at once


def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """f32[M, K]: log-probs of ``candidates`` i64[M, K] after hidden [M, H]; logits as in `linear_logprobs`.

    Differentiable in hidden, weight and bias; ``shard`` as there. Raises ValueError for a candidate outside of the
    vocabulary.
    """
    size = len(weight) if shard is None else shard.size
    if candidates.numel() and int(candidates.max()) >= size:
        raise ValueError(
            f"candidate token {int(candidates.max())} is outside of this model's vocabulary of {size}: "
            "teacher and student must share a tokenizer"
        )

    def block(hidden: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = _logits(hidden, weight, bias, temperature, scale, softcap)
        if shard is None:
            return logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
        own = ids - shard.first
        here = (own >= 0) & (own < len(weight))
        chosen = shard.sum(logits.gather(1, own.clamp(0, len(weight) - 1)) * here)
        return chosen - shard.logsumexp(logits.logsumexp(1))[:, None]

    size = _rows(hidden, weight)
    parts = zip(hidden.split(size), candidates.split(size), strict=True)
    return torch.cat([checkpoint(block, h, ids, weight, bias, use_reentrant=False) for h, ids in parts])


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens after hidden [M, H], best first: i64[M, K], and their log-probs f32[M, K].

    K is the smaller of k and the vocabulary.
    """
    ids, logprobs = [], []
    for part in hidden.split(_rows(hidden, weight)):
        logits = _logits(part, weight, bias, temperature, scale, softcap)
        normaliser = logits.logsumexp(1)
        values, indices = logits.topk(min(k, len(weight)), dim=1)
        if shard is not None:
            more = min(k, shard.size) - values.shape[1]  # all ranks gather equally many
            values, indices = F.pad(values, (0, more), value=-torch.inf), F.pad(indices + shard.first, (0, more))
            values, indices, normaliser = (
                shard.gather_all(values),
                shard.gather_all(indices),
                shard.logsumexp(normaliser),
            )
            values, best = values.topk(min(k, shard.size), dim=1)
            indices = indices.gather(1, best)
        ids.append(indices)
        logprobs.append(values - normaliser[:, None])
    return torch.cat(ids), torch.cat(logprobs)


@torch.no_grad()
def log_collision(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """f32[M]: log Σ p² over the vocabulary after hidden [M, H], the log-prob that two draws agree."""
    parts = []
    for part in hidden.split(_rows(hidden, weight)):
        logits = _logits(part, weight, bias, temperature, scale, softcap)
        normaliser = logits.logsumexp(1)
        squares = logits.mul_(2).logsumexp(1)
        if shard is not None:
            normaliser, squares = shard.logsumexp(normaliser), shard.logsumexp(squares)
        parts.append(squares - 2 * normaliser)
    return torch.cat(parts)


def _rows(hidden: Tensor, weight: Tensor) -> int:
    return max(1, BLOCK.get(hidden.device.type, BLOCK["cuda"]) // len(weight))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None
) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = scale * F.linear(hidden, weight.to(hidden.dtype), bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature
