"""Saves and loads a trainer's state in Megatron's format `torch_dist`, which any layout of ranks can read.

torch's own writer stores the shards that megatron-core plans. megatron-core's writer forks and spawns processes, which
is unsafe in a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from coalign.backends.megatron.training import BY_PARAMETER, MegatronPipeline, PipelineOptimizer
from coalign.weights.metadata import DistributedCheckpointPlanner, DistributedCheckpointReader

# Passed as copies: megatron-core adds process groups to them.
METADATA = {"distrib_optim_sharding_type": BY_PARAMETER, "chained_optim_avoid_prefix": True}


class _Writer(SaveShardedStrategy):
    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    can_handle_sharded_objects = True  # pyright: ignore[reportAssignmentType]  # a property of the base class

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir, thread_count=1)
        state_dict_saver.save(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)


class _Planner(MCoreLoadPlanner):
    load_bytes = DistributedCheckpointPlanner.load_bytes


class _Reader(TorchDistLoadShardedStrategy):
    """megatron-core's reader, which runs no code of the checkpoint."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        state, layout, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        torch_state = mcore_to_pyt_state_dict(state, True)
        DistributedCheckpointReader(checkpoint_dir).fill(torch_state, _Planner())
        loaded: Any = {key: _unwrap_pyt_sharded_tensor(value) for key, value in torch_state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, layout, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def save(
    dir: str | Path, pipeline: MegatronPipeline, optimizer: PipelineOptimizer, progress: Mapping[str, int]
) -> None:
    """Save the state of all ranks (a collective)."""
    Path(dir).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(pipeline, optimizer, loading=False) | {"progress": dict(progress), "steps": optimizer.steps}
    dist_checkpointing.save(state, str(dir), _Writer(), content_metadata=dict(METADATA))


def load(dir: str | Path, pipeline: MegatronPipeline, optimizer: PipelineOptimizer) -> dict[str, int]:
    """Load the state and return the progress (a collective). Raises FileNotFoundError without a checkpoint."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(dir)):
        raise FileNotFoundError(f"{dir} holds no checkpoint of a Megatron model (no metadata.json there)")
    state = cast(
        dict[str, Any], dist_checkpointing.load(_state(pipeline, optimizer, loading=True), str(dir), _Reader())
    )
    for title, model in zip(pipeline.titles, pipeline.models, strict=True):
        model.load_state_dict(state[title])
    optimizer.load(state["optimizer"], state["steps"])
    return state["progress"]


def _state(pipeline: MegatronPipeline, optimizer: PipelineOptimizer, *, loading: bool) -> dict[str, Any]:
    state = {
        title: model.sharded_state_dict(metadata=dict(METADATA))
        for title, model in zip(pipeline.titles, pipeline.models, strict=True)
    }
    return state | {"optimizer": optimizer.inner.sharded_state_dict(state, is_loading=loading, metadata=dict(METADATA))}
