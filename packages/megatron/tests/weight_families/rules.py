"""Parallel layouts as rules, to try coalign_megatron.layouts.shards on: which boxes of which full tensors a rank holds.

A rule says what one kind of own tensor is made of. Names are templates: `{layer}` and `{expert}` are numbers in the
full model, `{own_layer}` and `{own_expert}` count a rank's own. Sizes need not divide: rank i of t holds the units
⌊i·n/t⌋ … ⌊(i+1)·n/t⌋ - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from coalign_megatron.layouts.megatron import Coordinates, Mesh
from coalign_megatron.layouts.shards import Shape, Shard, ShardBox, TensorSpec

TensorRange = tuple[str, int, int]  # a full tensor's name, then the start and stop in the dimension that is cut
Where = Literal["layer", "first", "last", "every"]


class Cut(Protocol):
    """What one own tensor is made of. ``dim``: the dimension (of the full tensors) in which parts are joined."""

    dim: int

    def parts(self, shapes: Mapping[str, Shape], index: int, count: int) -> tuple[list[TensorRange], int]:
        """The parts on tensor-parallel rank ``index`` of ``count``, end to end, and how much padding follows."""


@dataclass(frozen=True, slots=True)
class UncutTensor:
    """The same on every rank."""

    name: str
    dim: int = 0

    def parts(self, shapes: Mapping[str, Shape], index: int, count: int) -> tuple[list[TensorRange], int]:
        return [(self.name, 0, shapes[self.name][self.dim])], 0


@dataclass(frozen=True, slots=True)
class Split:
    """Each of ``names`` cut in ``dim`` into units of ``unit`` (a head, say), and a rank's parts joined: [gate | up].

    ``multiple``: a vocabulary, padded at its end to a multiple of this.
    """

    names: tuple[str, ...]
    dim: int = 0
    unit: int = 1
    multiple: int = 1

    def parts(self, shapes: Mapping[str, Shape], index: int, count: int) -> tuple[list[TensorRange], int]:
        found, padding = [], 0
        for name in self.names:
            size = shapes[name][self.dim]
            padded = -(-size // self.multiple) * self.multiple
            start, stop = (end * self.unit for end in share(padded // self.unit, index, count))
            found.append((name, min(start, size), min(stop, size)))
            padding += stop - start - (found[-1][2] - found[-1][1])
        return found, padding


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values in one tensor. A rank has some query heads, and the groups of keys and values that these
    attend with, so a group stands on as many ranks as need it (fewer groups than ranks: multi-query).

    ``interleaved``: group by group its queries, key and value (Megatron); else all queries, all keys, all values.
    """

    query: str
    key: str
    value: str
    heads: int
    groups: int
    head: int  # rows of a head
    interleaved: bool = False
    dim: int = 0

    def parts(self, shapes: Mapping[str, Shape], index: int, count: int) -> tuple[list[TensorRange], int]:
        per = self.heads // self.groups
        first, last = share(self.heads, index, count)
        groups = range(first // per, -(-last // per)) if first < last else range(0)
        if not self.interleaved or not groups:
            ends = (groups.start, groups.stop)
            cuts = [(self.query, first, last), (self.key, *ends), (self.value, *ends)]
        else:
            cuts = [
                part
                for g in groups
                for part in (
                    (self.query, max(first, g * per), min(last, (g + 1) * per)),
                    (self.key, g, g + 1),
                    (self.value, g, g + 1),
                )
            ]
        return [(name, start * self.head, stop * self.head) for name, start, stop in cuts], 0


@dataclass(frozen=True, slots=True)
class Rule:
    """``own``, the name of a rank's tensor, is made as ``cut`` says, on the stages ``where``. A cut whose names have
    `{expert}` is made for each expert of a rank; ``stacked``: those are one tensor, with the expert in front."""

    own: str
    cut: Cut
    where: Where = "layer"
    experts: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class ParallelLayout:
    """``specs``: of all full tensors. ``stages``: the layers of each pipeline stage. ``experts``: those of each
    expert-parallel rank."""

    mesh: Mesh
    rules: Sequence[Rule]
    specs: Mapping[str, TensorSpec]
    stages: Sequence[Sequence[int]] = ()
    experts: Sequence[Sequence[int]] = ((),)

    def shards(self, rank: int) -> list[Shard]:
        """What a rank holds."""
        return list(self._shards(self.mesh.at(rank)))

    def ranks(self) -> list[list[Shard]]:
        """What each rank holds."""
        return [self.shards(rank) for rank in range(self.mesh.size)]

    def _shards(self, at: Coordinates) -> Iterator[Shard]:
        stage, last = at.pipeline[0], at.pipeline[1] - 1
        for rule in self.rules:
            here = {"layer": True, "every": True, "first": stage == 0, "last": stage == last}[rule.where]
            layers = enumerate(self.stages[stage]) if rule.where == "layer" else [(0, 0)]
            for own, layer in layers if here else ():
                yield from self._made(rule, {"layer": layer, "own_layer": own}, at)

    def _made(self, rule: Rule, numbers: dict[str, int], at: Coordinates) -> Iterator[Shard]:
        if not rule.experts:
            yield self._one(rule, [numbers], at.tensor)
            return
        experts = [numbers | {"expert": e, "own_expert": i} for i, e in enumerate(self.experts[at.expert[0]])]
        for together in [experts] if rule.stacked and experts else [[each] for each in experts]:
            yield self._one(rule, together, at.expert_tensor)

    def _one(self, rule: Rule, many: list[dict[str, int]], place: tuple[int, int]) -> Shard:
        pieces: list[ShardBox] = []
        for i, numbers in enumerate(many):
            shapes = Named(self.specs, numbers)
            parts, padding = rule.cut.parts(shapes, *place)
            shape, joined = _joined(shapes, parts, rule.cut.dim, padding)
            lead = ((i, i + 1),) if rule.stacked else ()
            pieces += [ShardBox(piece.name, piece.full, lead + piece.local) for piece in joined]
        like = Named(self.specs, many[0]).full(parts[0][0])
        return Shard(rule.own.format_map(many[0]), (len(many), *shape) if rule.stacked else shape, like, tuple(pieces))


class Named(Mapping[str, Shape]):
    """Shapes by the templates of names."""

    def __init__(self, specs: Mapping[str, TensorSpec], numbers: Mapping[str, int]) -> None:
        self.specs, self.numbers = specs, numbers

    def full(self, template: str) -> str:
        return template.format_map(self.numbers)

    def __getitem__(self, template: str) -> Shape:
        return self.specs[self.full(template)].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def _joined(shapes: Named, parts: list[TensorRange], dim: int, padding: int) -> tuple[Shape, list[ShardBox]]:
    """Parts end to end in one dimension, whole in the others."""
    pieces, at, others = [], 0, shapes[parts[0][0]]
    for template, start, stop in parts:
        full: list[tuple[int, int]] = [(0, size) for size in shapes[template]]
        own = list(full)
        full[dim], own[dim] = (start, stop), (at, at + stop - start)
        if start < stop:
            pieces.append(ShardBox(shapes.full(template), tuple(full), tuple(own)))
        at += stop - start
    return (*others[:dim], at + padding, *others[dim + 1 :]), pieces


def share(units: int, index: int, count: int) -> tuple[int, int]:
    """Where the units of rank ``index`` of ``count`` start and stop."""
    return index * units // count, (index + 1) * units // count


def contiguous(layers: int, stages: int) -> list[list[int]]:
    """The layers of each stage, as even as can be."""
    return [list(range(*share(layers, stage, stages))) for stage in range(stages)]
