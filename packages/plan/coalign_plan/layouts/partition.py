"""How each backend divides a model over its devices: which parameters a device computes with, and which it stores.

The degrees of parallelism are those of the configuration. What a backend refuses, it says itself
(coalign.backends.base.Module); here is only what follows for a layout that it accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from coalign.config.schema import PARALLEL, ModelConfig
from coalign_plan.model_size import LayerSize, ModelSize

ModelRole = Literal["rollout", "trainer", "scorer"]  # generates; learns; only computes columns
TRAINERS = ("fsdp", "deepspeed", "megatron")


@dataclass(frozen=True)
class ModelPartition:
    """The division of one model over ``ranks`` devices, or processes on the CPU.

    ``stores``: the components of the state (weights, gradients, optimizer) that data-parallel ranks shard.
    ``replicas``: copies of such a sharded state. ``gathers``: sharded weights are gathered layer by layer to compute.
    """

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    replicas: int = 1
    stores: tuple[str, ...] = ()
    gathers: bool = False
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def data(self) -> int:
        """Return the data-parallel size: the shards of a batch."""
        return max(1, self.ranks // (self.tensor * self.pipeline * self.context))

    def shards(self, component: str, *, experts: bool = False) -> int:
        """Return over how many ranks a component of the state of one stage and tensor rank is sharded."""
        if component not in self.stores:
            return 1
        cut = self.expert * self.expert_tensor if experts else self.tensor
        return max(1, self.ranks // (self.pipeline * cut * self.replicas))

    def divide_layers(self, layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage."""
        fixed = {
            stage: count
            for stage, count in ((0, self.first_layers), (self.pipeline - 1, self.last_layers))
            if count is not None
        }
        rest, free_stages = layers - sum(fixed.values()), self.pipeline - len(fixed)
        per_stage, more = divmod(rest, max(free_stages, 1))  # only engines have stages that differ by one
        return [fixed.get(stage, per_stage + (stage < more)) for stage in range(self.pipeline)]


@dataclass(frozen=True)
class StageSize:
    """One stage of a pipeline: its layers, and its parameters that tensor ranks and expert ranks divide.

    ``outer``: parameters of embedding and head, which ``dense`` includes.
    """

    layers: tuple[LayerSize, ...]
    dense: int
    experts: int
    outer: int
    has_head: bool


def find_partition(model: ModelConfig, role: ModelRole) -> ModelPartition:
    """Return how the backend of a model divides it. A class of somebody else counts as `fsdp`, or as a sampler."""
    trained, cut = role == "trainer" and not model.frozen, model.tensor_parallel * model.pipeline_parallel
    module = model.module.lower()
    if module not in TRAINERS and (role != "trainer" or ":" not in module):
        ranks, tensor = max(model.devices, cut), model.tensor_parallel
        return ModelPartition(ranks, tensor=tensor, pipeline=model.pipeline_parallel, expert_tensor=tensor)
    ranks = model.processes
    degrees = ModelPartition(
        ranks,
        tensor=model.tensor_parallel,
        pipeline=model.pipeline_parallel,
        context=model.context_parallel,
        expert=model.expert_parallel,
    )
    if module == "megatron":
        settings = model.megatron
        return replace(
            degrees,
            expert_tensor=settings.expert_tensor_parallel or model.tensor_parallel,
            virtual=settings.virtual_pipeline,
            stores=("optimizer",) if settings.distributed_optimizer else (),
            first_layers=settings.first_stage_layers,
            last_layers=settings.last_stage_layers,
        )
    if module == "deepspeed":
        stage = model.deepspeed.stage
        stores = ("optimizer", *(["gradients"] if stage > 1 else []), *(["weights"] if stage > 2 else []))
        return ModelPartition(ranks, stores=stores, gathers=stage > 2)
    if ranks == 1 or not (trained or is_cut(model)):  # each process holds the whole model
        return ModelPartition(ranks, stores=())
    stores = ("weights", "gradients", "optimizer")
    return replace(degrees, replicas=model.dp_replicate, stores=stores, gathers=True)


def is_cut(model: ModelConfig) -> bool:
    """Whether processes of a frozen model share it, because its settings cut it."""
    return any(getattr(model, key) > 1 for key in PARALLEL)


def divide_model(size: ModelSize, partition: ModelPartition, *, scalar_head: bool = False) -> list[StageSize]:
    """Return the stages of a model. With a ``scalar_head`` its head has one output, as of value and reward models.

    The towers of a vision-language model are not loaded, so they do not count.
    """
    layers = [layer for layer in size.layers for _ in range(layer.count)]
    head = size.hidden if scalar_head else size.head
    tied = size.is_tied and not scalar_head
    stages, start = [], 0
    for stage, count in enumerate(partition.divide_layers(len(layers))):
        stage_layers, start = tuple(layers[start : start + count]), start + count
        has_head = stage == partition.pipeline - 1
        outer = size.embedding if stage == 0 else 0
        if has_head and not (tied and stage == 0):  # a tied head of another stage is a copy
            outer += head
        experts = sum(layer.experts * layer.expert for layer in stage_layers)
        dense = sum(layer.parameters for layer in stage_layers) - experts + outer
        stages.append(StageSize(stage_layers, dense, experts, outer, has_head))
    return stages


def count_local(stage: StageSize, partition: ModelPartition, component: str) -> float:
    """Return for how many parameters of a stage one device stores a component: weights, gradients or optimizer."""
    dense = stage.dense / partition.tensor / partition.shards(component)
    experts = stage.experts / (partition.expert * partition.expert_tensor)
    return dense + experts / partition.shards(component, experts=True)
