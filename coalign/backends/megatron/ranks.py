"""Creates megatron-core's process groups, once for all models of a process."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from coalign.backends import process_group
from coalign.backends.hf.rows import RankAxis
from coalign.backends.megatron.partition import ParallelSizes
from coalign.roles import Context

_joined: ParallelSizes | None = None  # the partition of all models of this process
_models = 0  # that use the groups
_owns_process_group = False  # whether `leave` ends torch's process group


def join(sizes: ParallelSizes, context: Context) -> None:
    """Join the other ranks. All models of a process share megatron-core's groups, which are global to it.

    Raises ValueError for a second model of the process with another partition.
    """
    global _joined, _models, _owns_process_group
    if _joined not in (None, sizes):
        raise ValueError(
            f"megatron-core cuts all models of a process alike: {_joined} before, {sizes} now; give the models "
            "processes of their own (no common `runtime.colocation` group), or the same sizes"
        )
    if _joined is None:
        if not dist.is_initialized():
            process_group.join_process_group(context, host=True)
            _owns_process_group = True
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual if sizes.virtual > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=int(process_group.TIMEOUT.total_seconds() // 60),
        )
        seed_all(context.seed)
        _joined = sizes
    _models += 1


def leave() -> None:
    """Leave; the last model of the process destroys the groups."""
    global _joined, _models, _owns_process_group
    _models -= 1
    if _models == 0:
        parallel_state.destroy_model_parallel()
        if _owns_process_group:
            dist.destroy_process_group()
        _joined, _owns_process_group = None, False


def seed_all(seed: int) -> None:
    """Seed dropout: it differs between ranks with other rows or other parts of a layer, and is equal elsewhere."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def get_context_axis() -> RankAxis:
    """Return this rank's place among those that have parts of its rows."""
    group = cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
    return RankAxis(group.rank(), group.size(), group)


def get_data_group() -> dist.ProcessGroup:
    """Return the group of ranks that differ from this one only in their rows."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())
