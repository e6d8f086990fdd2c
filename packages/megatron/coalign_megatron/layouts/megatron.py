"""Megatron layouts: each rank's parameters, their names there, and the boxes of Hugging Face tensors in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coalign_megatron.families.family import Parameter
from coalign_megatron.layouts.megatron_model import (
    DUPLICATED,
    LAYER,
    TIED_HEAD,
    TOWER,
    LayerSpec,
    MegatronConfig,
    name_in_model,
)
from coalign_megatron.layouts.shards import Shard


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's (index, size) in each dimension of parallelism."""

    tensor: tuple[int, int]
    pipeline: tuple[int, int]
    expert: tuple[int, int]
    expert_tensor: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of each dimension of parallelism. Raises ValueError if they do not fit each other.

    Ranks count tensor-parallel first, then data-parallel, then pipeline stages. The experts of a stage are spread over
    all of its ranks, tensor-parallel ranks within an expert first.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        if self.tensor * self.data % (self.expert * self.expert_tensor):
            raise ValueError(
                f"expert {self.expert} × expert_tensor {self.expert_tensor} does not divide the {self.tensor} × "
                f"{self.data} ranks (tensor × data) of a stage"
            )

    @property
    def size(self) -> int:
        return self.tensor * self.data * self.pipeline

    def at(self, rank: int) -> Coordinates:
        stage, within = divmod(rank, self.tensor * self.data)
        return Coordinates(
            (within % self.tensor, self.tensor),
            (stage, self.pipeline),
            (within // self.expert_tensor % self.expert, self.expert),
            (within % self.expert_tensor, self.expert_tensor),
        )


Stages = tuple[tuple[tuple[int, ...], ...], ...]  # the layers of each chunk (virtual stage) of each pipeline stage


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Which rank has which shards of a Megatron model. ``spec``: whose layers it has, which decides the names.

    Raises ValueError for sizes that do not divide, and for stages that are not the model's layers in order.
    """

    config: MegatronConfig
    mesh: Mesh
    stages: Stages
    spec: LayerSpec = "local"

    def __post_init__(self) -> None:
        config, mesh = self.config, self.mesh
        sizes = (
            ("num_attention_heads", config.num_attention_heads, mesh.tensor),
            ("ffn_hidden_size", config.ffn_hidden_size if 0 in (config.moe_layer_freq or (0,)) else 0, mesh.tensor),
            ("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size or 0, mesh.tensor),
            ("moe_ffn_hidden_size", config.moe_ffn_hidden_size, mesh.expert_tensor),
            ("num_moe_experts", config.num_moe_experts or 0, mesh.expert),
        )
        for name, size, ranks in sizes:
            if size % ranks:
                raise ValueError(f"{name} {size} does not divide by {ranks} ranks")
        if config.num_query_groups % mesh.tensor and mesh.tensor % config.num_query_groups:
            raise ValueError(
                f"num_query_groups {config.num_query_groups} is neither a multiple nor a divisor of {mesh.tensor} ranks"
            )
        chunks = {len(chunks) for chunks in self.stages}
        if len(self.stages) != mesh.pipeline or len(chunks) != 1:
            raise ValueError(f"{mesh.pipeline} stages of as many chunks each are needed; given are {self.stages}")
        run = [layer for i in range(chunks.pop()) for stage in self.stages for layer in stage[i]]
        if run != list(range(config.num_layers)):
            raise ValueError(f"stages have the layers {run} in this order; the model has {config.num_layers}")

    def stage_of(self, parameter: Parameter) -> tuple[int, int]:
        """Return the stage and chunk of a parameter.

        A tied embedding is on the last chunk, too, under the output layer's name.
        """
        if parameter.layer is None:
            return (0, 0) if parameter.template.startswith(("embedding.", TOWER)) else self._last
        return next(
            (stage, chunk)
            for stage, chunks in enumerate(self.stages)
            for chunk, layers in enumerate(chunks)
            if parameter.layer in layers
        )

    def shards(self, parameters: Mapping[str, Parameter], at: Coordinates, chunk: int = 0) -> list[Shard]:
        """Return the tensors of one rank and chunk as boxes of Hugging Face tensors, for shards.cut, join and plan.

        Their names are local: layers and experts count from 0. Raises ValueError for a parameter that does not divide,
        or that has no name in this spec.
        """
        return [shard for _, shard in self.place(parameters, at, chunk)]

    def place(
        self, parameters: Mapping[str, Parameter], at: Coordinates, chunk: int = 0
    ) -> Iterator[tuple[Parameter, Shard]]:
        """Yield the parameters that one rank and chunk has a shard of, with that shard, as `shards` lists them."""
        here = (at.pipeline[0], chunk)
        layers = {layer: numbers for numbers, layer in enumerate(self.stages[at.pipeline[0]][chunk])}
        experts = (self.config.num_moe_experts or 0) // at.expert[1]
        first = at.expert[0] * experts
        local_experts = (None, *range(first, first + experts))
        for parameter in parameters.values():
            if self.stage_of(parameter) != here or parameter.expert not in local_experts:
                continue
            numbers = {"expert": (parameter.expert or 0) - first}
            if parameter.layer is not None:
                numbers["layer"] = layers[parameter.layer]
            name = name_in_model(self.config, parameter, self.spec).format_map(numbers)
            yield parameter, self._shard(parameter, name, at)
        if self.config.share_embeddings_and_output_weights and here == self._last != (0, 0):
            tied = parameters["embedding.word_embeddings.weight"]
            yield tied, self._shard(tied, TIED_HEAD[self.spec], at)

    @property
    def _last(self) -> tuple[int, int]:
        return len(self.stages) - 1, len(self.stages[-1]) - 1

    def _shard(self, parameter: Parameter, name: str, at: Coordinates) -> Shard:
        is_duplicated = self.spec == "te" and parameter.template.removeprefix(LAYER) in DUPLICATED
        coordinates = (0, 1) if is_duplicated else at.tensor if parameter.expert is None else at.expert_tensor
        shape, boxes = parameter.cut(*coordinates)
        pieces = tuple(piece for there, here in boxes for piece in parameter.placed(there, here))
        return Shard(name, shape, (pieces or parameter.pieces)[0].name, pieces)


def split_layers(
    layers: int, pipeline: int = 1, virtual: int = 1, *, first: int | None = None, last: int | None = None
) -> Stages:
    """Return Megatron's stages: chunk v of stage p starts at layer (v · pipeline + p) · layers / (pipeline · virtual).

    ``first``, ``last``: how many layers the first and the last stage have, if not as many as the others. MegatronLayout
    also takes other stages. Raises ValueError if the numbers do not divide.
    """
    fixed = {stage: count for stage, count in ((0, first), (pipeline - 1, last)) if count is not None}
    rest, unfixed = layers - sum(fixed.values()), pipeline - len(fixed)
    counts = [fixed.get(stage, rest // unfixed if unfixed else 0) for stage in range(pipeline)]
    if sum(counts) != layers or any(count % virtual for count in counts) or min(counts) < 0:
        given = "".join(f", {name} {count}" for name, count in (("first", first), ("last", last)) if count is not None)
        raise ValueError(f"{layers} layers do not divide by {pipeline} stages × {virtual} chunks{given}")
    stages: list[list[tuple[int, ...]]] = [[] for _ in range(pipeline)]
    start = 0
    for _ in range(virtual):
        for stage, count in enumerate(counts):
            stages[stage].append(tuple(range(start, start + count // virtual)))
            start += count // virtual
    return tuple(tuple(chunks) for chunks in stages)
