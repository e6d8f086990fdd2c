"""A trainer's state in Megatron's format `torch_dist`: any layout of ranks reads what another wrote.

What megatron-core says lies where is written by torch's own writer: megatron-core's forks and spawns processes, which a
worker must not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from coalign.backends.megatron.training import BY_PARAMETER, Optimizer, Pipeline

# Given as copies: megatron-core notes groups of ranks there.
METADATA = {"distrib_optim_sharding_type": BY_PARAMETER, "chained_optim_avoid_prefix": True}


class _Writer(SaveShardedStrategy):
    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = dcp.FileSystemWriter(checkpoint_dir, thread_count=1)
        dcp.save(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)


def save(dir: str | Path, pipeline: Pipeline, optimizer: Optimizer, progress: Mapping[str, int]) -> None:
    """A collective."""
    Path(dir).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(pipeline, optimizer, loading=False) | {"progress": dict(progress), "steps": optimizer.steps}
    dist_checkpointing.save(state, str(dir), _Writer(), content_metadata=dict(METADATA))


def load(dir: str | Path, pipeline: Pipeline, optimizer: Optimizer) -> dict[str, int]:
    """The progress. FileNotFoundError where there is no checkpoint. A collective."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(dir)):
        raise FileNotFoundError(f"{dir} holds no checkpoint of a Megatron model (no metadata.json there)")
    state = dist_checkpointing.load(_state(pipeline, optimizer, loading=True), str(dir))
    for title, model in zip(pipeline.titles, pipeline.models, strict=True):
        model.load_state_dict(state[title])
    optimizer.load(state["optimizer"], state["steps"])
    return state["progress"]


def _state(pipeline: Pipeline, optimizer: Optimizer, *, loading: bool) -> dict[str, Any]:
    state = {
        title: model.sharded_state_dict(metadata=dict(METADATA))
        for title, model in zip(pipeline.titles, pipeline.models, strict=True)
    }
    return state | {"optimizer": optimizer.inner.sharded_state_dict(state, is_loading=loading, metadata=dict(METADATA))}
