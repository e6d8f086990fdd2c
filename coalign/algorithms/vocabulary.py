"""A vocabulary that several ranks share out: each computes the logits of its own tokens, and what is asked of all of
them is put together. Every rank then has the same result and the same gradient of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The tokens that this rank of ``group`` has: those from ``first`` on, as many as the weight has rows (at least
    one), of ``size`` on all ranks."""

    group: dist.ProcessGroup
    first: int
    size: int

    def greatest(self, x: Tensor) -> Tensor:
        """Element by element over the ranks."""
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Element by element over the ranks. Differentiable: each rank takes the gradient as it is."""
        return _Sum.apply(x, self.group)

    def logsumexp(self, x: Tensor) -> Tensor:
        """Of the log-sum-exps [M] of all ranks. Differentiable, as ``sum`` is."""
        top = self.greatest(x.detach())
        return self.sum((x - top).exp()).log() + top

    def all(self, x: Tensor) -> Tensor:
        """[M, k] on each of n ranks -> [M, n · k]."""
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
