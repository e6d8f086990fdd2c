"""Which parameters a rank of a Megatron model holds, under which names, and which boxes of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coalign.weights.families.family import Parameter
from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.megatron_model import LAYER, cut_of
from coalign.weights.layouts.megatron_names import DUPLICATED, TIED_HEAD, Spec, in_model
from coalign.weights.layouts.parallel import Coordinates, Mesh
from coalign.weights.layouts.shards import Shard

Stages = tuple[tuple[tuple[int, ...], ...], ...]  # of each pipeline stage, of each of its chunks: the layers


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """``mesh``: sizes and the order of ranks. ``stages``: the layers of each stage and chunk (virtual stage).
    ``spec``: whose layers, so which names.

    ValueError, with the numbers, for what does not divide and for stages that are not these layers in order.
    """

    config: MegatronConfig
    mesh: Mesh
    stages: Stages
    spec: Spec = "local"

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
        """The stage and chunk that hold it. A tied embedding is on the last one, too, with the output layer's name."""
        if parameter.layer is None:
            return (0, 0) if parameter.template.startswith("embedding.") else self._last
        return next(
            (stage, chunk)
            for stage, chunks in enumerate(self.stages)
            for chunk, layers in enumerate(chunks)
            if parameter.layer in layers
        )

    def shards(self, parameters: Mapping[str, Parameter], at: Coordinates, chunk: int = 0) -> list[Shard]:
        """What the rank at these coordinates holds in a chunk, by local names (layers and experts count from 0), as
        boxes of the views of Hugging Face tensors: for coalign.weights.layouts.shards.cut, join and plan.

        ValueError for a parameter that does not divide, or that has no name in this spec.
        """
        here = (at.pipeline[0], chunk)
        layers = {layer: own for own, layer in enumerate(self.stages[at.pipeline[0]][chunk])}
        first, last = _experts(self.config, at.expert)
        held = []
        for parameter in parameters.values():
            if self.stage_of(parameter) != here or not (parameter.expert is None or first <= parameter.expert < last):
                continue
            own = {"layer": layers.get(parameter.layer), "expert": (parameter.expert or 0) - first}
            name = in_model(self.config, parameter, self.spec).format_map(own)
            held.append(self._own(parameter, name, at))
        if self.config.share_embeddings_and_output_weights and here == self._last != (0, 0):
            held.append(self._own(parameters["embedding.word_embeddings.weight"], TIED_HEAD[self.spec], at))
        return held

    @property
    def _last(self) -> tuple[int, int]:
        return len(self.stages) - 1, len(self.stages[-1]) - 1

    def _own(self, parameter: Parameter, name: str, at: Coordinates) -> Shard:
        """A rank's part of a parameter, in boxes of what the parameter is made of."""
        whole = self.spec == "te" and parameter.template.removeprefix(LAYER) in DUPLICATED
        place = (0, 1) if whole else at.tensor if parameter.expert is None else at.expert_tensor
        shape, boxes = cut_of(parameter, *place)
        pieces = tuple(piece for there, here in boxes for piece in parameter.placed(there, here))
        return Shard(name, shape, (pieces or parameter.pieces)[0].name, pieces)


def _experts(config: MegatronConfig, place: tuple[int, int]) -> tuple[int, int]:
    """Which experts a rank holds: from … to …"""
    each = (config.num_moe_experts or 0) // place[1]
    return place[0] * each, (place[0] + 1) * each


def stages(
    layers: int, pipeline: int = 1, virtual: int = 1, *, first: int | None = None, last: int | None = None
) -> Stages:
    """Megatron's split: chunk v of stage p has the layers from (v · pipeline + p) · layers / (pipeline · virtual) on.

    ``first``, ``last``: how many layers the first and the last stage have, where these are others than the rest; stages
    of one's own are given to MegatronLayout as they are. ValueError if it does not divide.
    """
    fixed = {stage: count for stage, count in ((0, first), (pipeline - 1, last)) if count is not None}
    rest, others = layers - sum(fixed.values()), pipeline - len(fixed)
    counts = [fixed.get(stage, rest // others if others else 0) for stage in range(pipeline)]
    if sum(counts) != layers or any(count % virtual for count in counts) or min(counts) < 0:
        given = "".join(f", {name} {count}" for name, count in (("first", first), ("last", last)) if count is not None)
        raise ValueError(f"{layers} layers do not divide by {pipeline} stages × {virtual} chunks{given}")
    found: list[list[tuple[int, ...]]] = [[] for _ in range(pipeline)]
    start = 0
    for _ in range(virtual):
        for stage, count in enumerate(counts):
            found[stage].append(tuple(range(start, start + count // virtual)))
            start += count // virtual
    return tuple(tuple(chunks) for chunks in found)
