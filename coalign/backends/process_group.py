"""The process group of one model's ranks, its differentiable collectives, and determinism of a whole process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coalign.roles import Context
from coalign.weights.sync.transport import open_store

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def join_process_group(context: Context, *, host: bool = False) -> None:
    """Make the default process group of this model's ranks, which meet at ``context.rendezvous``. ``host``: the ranks
    also exchange tensors in the host's memory. ValueError for several ranks without an address."""
    alone = context.world_size == 1
    if context.rendezvous is None and not alone:
        raise ValueError(f"model '{context.model}' has {context.world_size} ranks and no rendezvous address")
    device_type = torch.device(context.device).type
    backend = dist.get_default_backend_for_device(device_type)
    dist.init_process_group(
        f"cpu:gloo,{device_type}:{backend}" if host and device_type != "cpu" else backend,
        store=_open_store(context),
        rank=context.rank,
        world_size=context.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _open_store(context: Context) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage] (documented as public)
    """Open the store at which the ranks meet: rank 0 listens on the interface of the rendezvous address."""
    if context.world_size == 1 or context.rendezvous is None:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    host, _, port = context.rendezvous.rpartition(":")
    if context.rank == 0:
        return open_store(host, int(port))
    return dist.TCPStore(host, int(port), is_master=False, timeout=COLLECTIVE_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]


def all_reduce_values(
    values: Sequence[float], op: str, device: torch.device, group: dist.ProcessGroup | None
) -> list[float]:
    """The ``sum`` or ``max`` of each value over the ranks of ``group`` (None: all)."""
    all_of = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(all_of, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=group)
    return all_of.tolist()


def enforce_determinism(**libraries: str) -> None:
    """Use only operations whose result does not depend on the order of threads; others raise RuntimeError.
    ``libraries``: environment variables that tell further libraries the same."""
    for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **libraries}.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Else every `empty` is filled, which helps only to find reads of what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] (a property)


Group = dist.ProcessGroup


class AllGather(torch.autograd.Function):
    """[n, …] on each of k ranks -> [k·n, …], end to end. The backward is a reduce-scatter: every rank computes a share
    of the result, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """[k·n, …] on each of k ranks -> each rank's [n, …] of the sum over ranks. The backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class AllToAll(torch.autograd.Function):
    """Split in dimension ``split``, one chunk for each rank; the received chunks are joined in dimension ``join``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.dims = group, (split, join)
        return _all_to_all(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        split, join = ctx.dims
        return _all_to_all(grad, ctx.group, join, split), None, None, None


class ScatterRows(torch.autograd.Function):
    """[n, …], rows ``at`` i64[n] of a tensor -> the tensor [size, …]; the groups' other ranks hold its other rows.

    All ranks then compute the same from it, so each takes the gradient of its own rows without a sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor, size: int, *groups: Group) -> Tensor:
        ctx.save_for_backward(at)
        full = rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, at, rows)
        for group in groups:
            dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (at,) = ctx.saved_tensors
        return grad.index_select(0, at), *[None] * (len(ctx.needs_input_grad) - 1)


def _all_gather(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather(list(out.chunk(group.size())), x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter(out, list(x.contiguous().chunk(group.size())), group=group)
    return out


def _all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    chunks = torch.stack(x.chunk(group.size(), split))
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=group)
    return torch.cat(received.unbind(), join)
