"""Hugging Face tensors in and out of a Megatron model over ranks: each reads, and gives, parts of what it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coalign.weights.families import Family, MegatronConfig, Parameter
from coalign.weights.families.sources import HuggingFaceTensor
from coalign.weights.layouts.megatron import MegatronLayout
from coalign.weights.layouts.shards import Box, BoxCopy, Shard, ShardBox, cut, plan

SCORE = "score.weight"  # of a value or reward model, in every Hugging Face directory


@dataclass(frozen=True)
class Weights:
    """What each rank of ``layout`` has. ``vocabulary``: what its padded size is a multiple of. ``scalar``: the head is
    one row."""

    family: Family
    layout: MegatronLayout
    vocabulary: int
    scalar: bool = False
    _known: dict[bool, dict[str, Parameter]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def padded(self) -> int:
        """Rows of the embedding and the output layer."""
        return -(-self.layout.config.vocab_size // self.vocabulary) * self.vocabulary

    def parameters(self, *, in_memory: bool) -> dict[str, Parameter]:
        """Of the whole model; ``in_memory``: made of the tensors of a transformers model, not of a file."""
        if in_memory not in self._known:  # thousands of experts take seconds
            self._known[in_memory] = self._parameters(in_memory)
        return self._known[in_memory]

    def _parameters(self, in_memory: bool) -> dict[str, Parameter]:
        config = self.layout.config
        found = self.family.parameters(config, vocab_divisor=self.vocabulary, in_memory=in_memory)
        if self.scalar:
            name, shape = "output_layer.weight", (1, config.hidden_size)
            box: Box = tuple((0, size) for size in shape)
            sources, pieces = {SCORE: HuggingFaceTensor(SCORE, shape)}, (ShardBox(SCORE, box, box),)
            found[name] = Parameter(name, shape, "replicated", None, None, False, None, sources, pieces)
        return found

    def sources(self, *, in_memory: bool) -> dict[str, HuggingFaceTensor]:
        """The Hugging Face tensors."""
        return {name: s for p in self.parameters(in_memory=in_memory).values() for name, s in p.sources.items()}

    def shards(self, rank: int, *, in_memory: bool) -> list[Shard]:
        """What a rank holds, in all of its chunks, by `<chunk>/<name in the chunk>`."""
        parameters, at = self.parameters(in_memory=in_memory), self.layout.mesh.at(rank)
        return [
            replace(shard, name=f"{chunk}/{shard.name}")
            for chunk in range(len(self.layout.stages[at.pipeline[0]]))
            for shard in self.layout.shards(parameters, at, chunk)
        ]

    def read(self, rank: int, tensor: Callable[[str], Tensor], *, in_memory: bool) -> Iterator[tuple[str, Tensor]]:
        """A rank's own tensors from Hugging Face ones by name, one at a time. ValueError for a shape that is wrong."""
        sources = self.sources(in_memory=in_memory)
        return cut(lambda name: sources[name].read(tensor(name)), self.shards(rank, in_memory=in_memory))


class Export:
    """The way back: Hugging Face tensors from those of the ranks, each on one rank only, dealt out evenly.

    The ranks of a pipeline stage make the tensors of its layers among themselves. They send each other no more than
    what is missing, a tensor for each rank at a time.
    """

    def __init__(self, weights: Weights, rank: int, *, in_memory: bool) -> None:
        mesh = weights.layout.mesh
        self.rank, self.sources = rank, weights.sources(in_memory=in_memory)
        self.stage = [r for r in range(mesh.size) if mesh.at(r).pipeline == mesh.at(rank).pipeline]
        self.held = [weights.shards(r, in_memory=in_memory) for r in self.stage]
        # A tied embedding is on the last stage, too, where it is not made once more.
        parameters, own = weights.parameters(in_memory=in_memory), mesh.at(rank).pipeline[0]
        here = {name for p in parameters.values() if weights.layout.stage_of(p)[0] == own for name in p.sources}
        self.names = [name for name in self.sources if name in here]

    @cached_property
    def moves(self) -> dict[str, list[BoxCopy]]:
        """Of each tensor, what its owner takes from whom (places in the stage)."""
        found: dict[str, list[BoxCopy]] = {}
        for number, name in enumerate(self.names):
            owner = number % len(self.stage)
            box: Box = tuple((0, size) for size in self.sources[name].shape)
            whole = Shard(name, self.sources[name].shape, name, (ShardBox(name, box, box),))
            found |= plan([whole], self.held, near=owner)
        return found

    def tensors(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor as it is stored) of this rank's share, from its own tensors by `<chunk>/<name>`. A collective
        of the stage's ranks."""
        me, ranks = self.stage.index(self.rank), len(self.stage)
        for start in range(0, len(self.names), ranks):
            together = self.names[start : start + ranks]
            given = _exchange(together, self.moves, own, self.stage, me)
            if me < len(together):
                name = together[me]
                yield name, self.sources[name].write(_assembled(self.sources[name], given))


def _exchange(
    names: Sequence[str],
    moves: Mapping[str, Sequence[BoxCopy]],
    own: Mapping[str, Tensor],
    stage: Sequence[int],
    me: int,
) -> list[tuple[BoxCopy, Tensor]]:
    """What this rank takes for its tensor among ``names``, the i-th of which rank i of the stage makes. One message
    from each rank to each other one, if any."""
    mine = moves[names[me]] if me < len(names) else []
    out: dict[int, list[Tensor]] = defaultdict(list)
    for owner, name in enumerate(names):
        for move in moves[name]:
            if move.rank == me and owner != me:
                out[owner].append(_box(own[move.source], move.taken).reshape(-1))
    come: dict[int, list[BoxCopy]] = defaultdict(list)
    for move in mine:
        if move.rank != me:
            come[move.rank].append(move)
    like = next(iter(own.values()))
    buffers = {r: like.new_empty(sum(_size(m.taken) for m in parts)) for r, parts in come.items()}
    operations = [dist.P2POp(dist.isend, torch.cat(parts), stage[r]) for r, parts in sorted(out.items())]
    operations += [dist.P2POp(dist.irecv, buffer, stage[r]) for r, buffer in sorted(buffers.items())]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    pieces = {r: iter(buffer.split([_size(m.taken) for m in come[r]])) for r, buffer in buffers.items()}
    return [(m, _box(own[m.source], m.taken) if m.rank == me else next(pieces[m.rank])) for m in mine]


def _assembled(source: HuggingFaceTensor, given: Sequence[tuple[BoxCopy, Tensor]]) -> Tensor:
    """The view of a Hugging Face tensor."""
    first = given[0][1]
    if len(given) == 1 and tuple(first.shape) == source.shape:
        return first  # a rank alone gives its live tensors
    view = first.new_empty(source.shape)
    for move, part in given:
        place = _box(view, move.given)
        place.copy_(part.reshape(place.shape))
    return view


def _box(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*ends) for ends in box)]


def _size(box: Box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def divisor(config: MegatronConfig, ranks: int) -> int:
    """What the padded vocabulary is a multiple of: Megatron's 128 for each rank, if that leaves every rank tokens."""
    return 128 * ranks if config.vocab_size > 128 * ranks * (ranks - 1) else ranks


def held(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The live tensors of a rank's chunks by `<chunk>/<name in the chunk>`."""
    states = enumerate(chunk.state_dict(keep_vars=True) for chunk in chunks)
    return {f"{i}/{name}": t for i, state in states for name, t in state.items() if isinstance(t, Tensor)}
