"""Shards of full tensors on the ranks of a parallel model: how to cut, join and reshard them.

Everything is boxes: a rank's own tensor is made of pieces, each a box of a full (Hugging Face) tensor. Whatever a
backend does to its weights (cut, fuse, interleave, stack, pad, repeat) is a list of such pieces. So cutting, joining
and resharding are written once, for both directions. coalign_megatron.layouts.megatron makes such lists.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from coalign.weights.sync.transport import WeightError

Box = tuple[tuple[int, int], ...]  # start and stop in each dimension
Shape = tuple[int, ...]
Fetch = Callable[[int, str], Tensor]  # (rank, name) → that rank's own tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ShardBox:
    """The box ``full`` of the full tensor ``name`` lies at ``own``, a box of the same sizes in a rank's own tensor.

    One of the two may have more dimensions in front, of size 1.
    """

    name: str
    full: Box
    own: Box

    def within(self, box: Box) -> Box:
        """Return where a box of the full tensor, inside of this piece, lies in the rank's own tensor."""
        lead, drop = max(0, len(self.own) - len(self.full)), max(0, len(self.full) - len(self.own))
        shifts = [own[0] - full[0] for own, full in zip(self.own[lead:], self.full[drop:], strict=True)]
        return self.own[:lead] + tuple((a + by, b + by) for (a, b), by in zip(box[drop:], shifts, strict=True))


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's own tensor; it has the dtype of the full tensor ``like``. What no piece covers is padding, 0."""

    name: str
    shape: Shape
    like: str
    pieces: tuple[ShardBox, ...]


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A copy of box ``taken`` of tensor ``source`` on ``rank`` to box ``given`` of the own tensor ``target``."""

    rank: int
    source: str
    taken: Box
    target: str
    given: Box


def cut(full: Callable[[str], Tensor], shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's own tensors, made of full ones by name."""
    for shard in shards:
        tensors = {name: full(name) for name in dict.fromkeys(piece.name for piece in shard.pieces)}
        own = (tensors[shard.like] if tensors else full(shard.like)).new_zeros(shard.shape)
        for piece in shard.pieces:
            _put(own, piece.own, tensors[piece.name][slices(piece.full)])
        yield shard.name, own


def join(
    specs: Mapping[str, TensorSpec], ranks: Sequence[Sequence[Shard]], fetch: Fetch
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors, made of the ranks' own: the inverse of ``cut``.

    Raises WeightError for what no rank has.
    """
    boxes = {name: tuple((0, size) for size in spec.shape) for name, spec in specs.items()}
    whole = [Shard(name, specs[name].shape, name, (ShardBox(name, box, box),)) for name, box in boxes.items()]
    return reshard(specs, whole, dict(plan(whole, ranks)), fetch)


def reshard(
    specs: Mapping[str, TensorSpec],
    target: Iterable[Shard],
    moves: Mapping[str, Sequence[BoxCopy]],
    fetch: Fetch,
    new: Callable[..., Tensor] = torch.empty,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's own tensors, made by the ``moves`` of ``plan`` from those of another layout's ranks.

    ``new``: makes an empty tensor.
    """
    for shard in target:
        own = new(shard.shape, dtype=specs[shard.like].dtype)
        if sum(_size(move.given) for move in moves[shard.name]) < own.numel():
            own.zero_()
        for move in moves[shard.name]:
            _put(own, move.given, fetch(move.rank, move.source)[slices(move.taken)])
        yield shard.name, own


def plan(
    target: Sequence[Shard], sources: Sequence[Sequence[Shard]], near: int = 0
) -> Iterator[tuple[str, list[BoxCopy]]]:
    """Yield for each tensor of a target rank the copies that fill it, every element once.

    ``near``: the source rank to prefer for what several have, then those after it; different target ranks should not
    all ask the same one. Raises WeightError naming what no source rank has.
    """
    held: dict[str, list[tuple[int, str, ShardBox]]] = {}
    for rank, shards in enumerate(sources):
        for shard in shards:
            for piece in shard.pieces:
                held.setdefault(piece.name, []).append((rank, shard.name, piece))
    for shard in target:
        moves: list[BoxCopy] = []
        for piece in shard.pieces:
            missing = [piece.full]
            asked = held.get(piece.name, [])
            first = bisect_left(asked, near, key=lambda each: each[0])
            for rank, name, source in chain(asked[first:], asked[:first]):
                rest: list[Box] = []
                for box in missing:
                    if (both := overlap(box, source.full)) is None:
                        rest.append(box)
                    else:
                        moves.append(BoxCopy(rank, name, source.within(both), shard.name, piece.within(both)))
                        rest += subtract(box, both) if both != box else []
                if not (missing := rest):
                    break
            if missing:
                raise WeightError(
                    f"no source rank holds {list(missing[0])} of '{piece.name}', wanted for '{shard.name}'"
                )
        yield shard.name, moves


# ---- boxes


def overlap(a: Box, b: Box) -> Box | None:
    """Return what two boxes have in common, or None."""
    both = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` without ``hole``, which lies inside, as boxes that do not overlap."""
    rest, core = [], list(box)
    for i, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        for side in ((start, first), (last, stop)):
            if side[0] < side[1]:
                rest.append((*core[:i], side, *core[i + 1 :]))
        core[i] = (first, last)
    return rest


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def _put(tensor: Tensor, box: Box, value: Tensor) -> None:
    place = tensor[slices(box)]
    place.copy_(value.reshape(place.shape))
