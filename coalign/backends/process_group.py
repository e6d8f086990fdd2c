"""Settings of a whole process: its default process group, which one model's ranks form, and determinism."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from coalign.roles import Context
from coalign.weights.sync.transport import open_store

TIMEOUT = timedelta(minutes=10)  # of a collective


def join_process_group(context: Context, *, host: bool = False) -> None:
    """Make the default process group of this model's ranks, which meet at ``context.rendezvous``. ``host``: the ranks
    also exchange tensors in the host's memory. ValueError for several ranks without an address."""
    alone = context.world_size == 1
    if context.rendezvous is None and not alone:
        raise ValueError(f"model '{context.model}' has {context.world_size} ranks and no rendezvous address")
    device = torch.device(context.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if host and device.type == "cuda" else {"cpu": "gloo", "cuda": "nccl"}[device.type],
        store=_open_store(context),
        rank=context.rank,
        world_size=context.world_size,
        timeout=TIMEOUT,
    )


def _open_store(context: Context) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage] (documented as public)
    """Where the ranks meet: rank 0 listens on the interface of the rendezvous address."""
    if context.world_size == 1 or context.rendezvous is None:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    host, _, port = context.rendezvous.rpartition(":")
    if context.rank == 0:
        return open_store(host, int(port))
    return dist.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]


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
