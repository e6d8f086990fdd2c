"""What ranks exchange in the middle of a forward, with the exchange that its backward needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


class AllGather(torch.autograd.Function):
    """[n, …] on each of k ranks -> [k·n, …], end to end. Every rank uses the result for a part of what is computed, so
    gradients are summed, and each rank takes its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """[k·n, …] on each of k ranks -> the sum over ranks, of which each takes its own [n, …]: the way back of Gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


class AllToAll(torch.autograd.Function):
    """Cut in dimension ``split`` into a piece for each rank; the pieces that come are joined in dimension ``join``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.dims = group, (split, join)
        return _exchanged(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        split, join = ctx.dims
        return _exchanged(grad, ctx.group, join, split), None, None, None


class ScatterRows(torch.autograd.Function):
    """Rows [n, …] of a whole [size, …] that stand ``at`` i64[n] there; each rank of the groups has others. All of them
    then compute the same of it, so each takes the gradient of its own rows as it is."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, at: Tensor, size: int, *groups: Group) -> Tensor:
        ctx.save_for_backward(at)
        whole = own.new_zeros(size, *own.shape[1:]).index_copy_(0, at, own)
        for group in groups:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (at,) = ctx.saved_tensors
        return grad.index_select(0, at), *[None] * (len(ctx.needs_input_grad) - 1)


def _gathered(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather(list(out.chunk(group.size())), x.contiguous(), group=group)
    return out


def _summed(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter(out, list(x.contiguous().chunk(group.size())), group=group)
    return out


def _exchanged(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    pieces = torch.stack(x.chunk(group.size(), split))
    come = torch.empty_like(pieces)
    dist.all_to_all_single(come, pieces, group=group)
    return torch.cat(come.unbind(), join)
