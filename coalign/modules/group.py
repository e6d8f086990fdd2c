"""The process group of one model's ranks, which torch takes to be the only one of a process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from coalign.types import Context

TIMEOUT = timedelta(minutes=10)  # of a collective


def join(context: Context, *, host: bool = False) -> None:
    """Make the process group of this model's ranks, which meet at ``context.rendezvous``. ``host``: they exchange what
    lies in the host's memory, too."""
    if context.rendezvous is None:
        raise ValueError(f"model '{context.model}' has {context.world_size} ranks and no rendezvous address")
    device = torch.device(context.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if host and device.type == "cuda" else {"cpu": "gloo", "cuda": "nccl"}[device.type],
        init_method=f"tcp://{context.rendezvous}",
        rank=context.rank,
        world_size=context.world_size,
        timeout=TIMEOUT,
    )
