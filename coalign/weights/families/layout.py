"""Which parameters a rank of a Megatron model holds, under which names, and which boxes of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coalign.weights.families.cuts import cut_of
from coalign.weights.families.family import Parameter
from coalign.weights.layout import Coordinates, Mesh
from coalign.weights.shards import Piece, Shard, overlap

Stages = tuple[tuple[tuple[int, ...], ...], ...]  # of each pipeline stage, of each of its chunks: the layers


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """``mesh``: sizes and the order of ranks. ``stages``: the layers of each stage and chunk (virtual stage)."""

    mesh: Mesh
    stages: Stages

    def stage_of(self, parameter: Parameter) -> tuple[int, int]:
        """The stage and chunk that hold it. A tied embedding is also on the last one, as `output_layer.weight`."""
        if parameter.layer is None:
            first = parameter.template.startswith("embedding.")
            return (0, 0) if first else (len(self.stages) - 1, len(self.stages[-1]) - 1)
        return next(
            (stage, chunk)
            for stage, chunks in enumerate(self.stages)
            for chunk, layers in enumerate(chunks)
            if parameter.layer in layers
        )

    def shards(self, parameters: Mapping[str, Parameter], at: Coordinates, chunk: int = 0) -> list[Shard]:
        """What the rank at these coordinates holds in a chunk, by local names (layers and experts count from 0), as
        boxes of the views of Hugging Face tensors: for coalign.weights.shards.cut, join and plan."""
        layers = self.stages[at.pipeline[0]][chunk]
        held = []
        for parameter in parameters.values():
            if self.stage_of(parameter) != (at.pipeline[0], chunk):
                continue
            own_layer = None if parameter.layer is None else layers.index(parameter.layer)
            held.append(_own(parameter, parameter.template.format(layer=own_layer, expert=None), at.tensor))
        return held


def _own(parameter: Parameter, name: str, place: tuple[int, int]) -> Shard:
    """A rank's part of a parameter, in boxes of what the parameter is made of."""
    shape, boxes = cut_of(parameter, *place)
    pieces = []
    for there, here in boxes:
        cut = Piece(name, there, here)
        for piece in parameter.pieces:
            if (both := overlap(there, piece.own)) is not None:
                back = Piece(piece.name, piece.own, piece.full)
                pieces.append(Piece(piece.name, back.within(both), cut.within(both)))
    return Shard(name, shape, parameter.pieces[0].name, tuple(pieces))


def stages(layers: int, pipeline: int = 1, virtual: int = 1) -> Stages:
    """Megatron's even split: chunk v of stage p has the layers from (v · pipeline + p) · layers / (pipeline · virtual)
    on. ValueError if it does not divide."""
    if layers % (pipeline * virtual):
        raise ValueError(f"{layers} layers do not divide by {pipeline} stages × {virtual} chunks")
    each = layers // (pipeline * virtual)
    starts = [[(v * pipeline + p) * each for v in range(virtual)] for p in range(pipeline)]
    return tuple(tuple(tuple(range(start, start + each)) for start in chunks) for chunks in starts)
