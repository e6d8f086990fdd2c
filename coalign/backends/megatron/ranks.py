"""The ranks of a Megatron model: megatron-core's process groups, made once for all models of a process."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from coalign.backends import process_group
from coalign.backends.hf.rows import RankAxis
from coalign.backends.megatron.partition import Sizes
from coalign.roles import Context

_joined: Sizes | None = None  # of this process
_models = 0  # that use the groups
_met = False  # whether the process group beneath is ours to end


def join(sizes: Sizes, context: Context) -> None:
    """Meet the other ranks. Models of one process share megatron-core's groups, which are global to it.

    Raises ValueError for a second model of a process that is cut in another way.
    """
    global _joined, _models, _met
    if _joined not in (None, sizes):
        raise ValueError(
            f"megatron-core cuts all models of a process alike: {_joined} before, {sizes} now; give the models "
            "processes of their own (no common `runtime.colocation` group), or the same sizes"
        )
    if _joined is None:
        if not dist.is_initialized():
            process_group.join_process_group(context, host=True)
            _met = True
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
    """The last model of the process ends the groups."""
    global _joined, _models, _met
    _models -= 1
    if _models == 0:
        parallel_state.destroy_model_parallel()
        if _met:
            dist.destroy_process_group()
        _joined, _met = None, False


def seed_all(seed: int) -> None:
    """Dropout differs between ranks that have other rows, or other parts of a layer; elsewhere it is the same."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def context() -> RankAxis:
    """This rank's place among those that have parts of its rows."""
    found = parallel_state.get_context_parallel_group()
    return RankAxis(found.rank(), found.size(), found)


def data() -> dist.ProcessGroup:
    """The ranks that have other rows than this one and each other, and are alike in all else."""
    return parallel_state.get_data_parallel_group()
