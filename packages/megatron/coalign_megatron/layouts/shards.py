"""Shards of full tensors on the ranks of a parallel model: how to cut, join and reshard them.

Everything is boxes: a rank's local tensor is made of pieces, each a box of a full (Hugging Face) tensor. Whatever a
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
Fetch = Callable[[int, str], Tensor]  # (rank, name) → that rank's local tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ShardBox:
    """The box ``full`` of the full tensor ``name`` lies at ``local``, a box of the same sizes in a rank's local tensor.

    One of the two may have more dimensions in front, of size 1.
    """

    name: str
    full: Box
    local: Box

    def within(self, box: Box) -> Box:
        """Return where a box of the full tensor, inside of this piece, lies in the rank's local tensor."""
        lead, drop = max(0, len(self.local) - len(self.full)), max(0, len(self.full) - len(self.local))
        shifts = [local[0] - full[0] for local, full in zip(self.local[lead:], self.full[drop:], strict=True)]
        return self.local[:lead] + tuple((a + by, b + by) for (a, b), by in zip(box[drop:], shifts, strict=True))


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's local tensor, with the dtype of the full tensor ``like``. Elements outside all pieces are padding, 0."""

    name: str
    shape: Shape
    like: str
    pieces: tuple[ShardBox, ...]


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A copy of ``source_box`` of tensor ``source`` on ``rank`` to ``target_box`` of the local tensor ``target``."""

    rank: int
    source: str
    source_box: Box
    target: str
    target_box: Box


def cut(full: Callable[[str], Tensor], shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's local tensors, made of full ones by name."""
    for shard in shards:
        tensors = {name: full(name) for name in dict.fromkeys(piece.name for piece in shard.pieces)}
        tensor = (tensors[shard.like] if tensors else full(shard.like)).new_zeros(shard.shape)
        for piece in shard.pieces:
            _put(tensor, piece.local, tensors[piece.name][slices(piece.full)])
        yield shard.name, tensor


def join(
    specs: Mapping[str, TensorSpec], ranks: Sequence[Sequence[Shard]], fetch: Fetch
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors, made of the ranks' local ones: the inverse of ``cut``.

    Raises WeightError for elements that no rank has.
    """
    boxes = {name: tuple((0, size) for size in spec.shape) for name, spec in specs.items()}
    full_shards = [Shard(name, specs[name].shape, name, (ShardBox(name, box, box),)) for name, box in boxes.items()]
    return reshard(specs, full_shards, dict(plan(full_shards, ranks)), fetch)


def reshard(
    specs: Mapping[str, TensorSpec],
    target: Iterable[Shard],
    moves: Mapping[str, Sequence[BoxCopy]],
    fetch: Fetch,
    new: Callable[..., Tensor] = torch.empty,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's local tensors, made by the ``moves`` of ``plan`` from those of another layout's ranks.

    ``new``: makes an empty tensor.
    """
    for shard in target:
        tensor = new(shard.shape, dtype=specs[shard.like].dtype)
        if sum(_size(move.target_box) for move in moves[shard.name]) < tensor.numel():
            tensor.zero_()
        for move in moves[shard.name]:
            _put(tensor, move.target_box, fetch(move.rank, move.source)[slices(move.source_box)])
        yield shard.name, tensor


def plan(
    target: Sequence[Shard], sources: Sequence[Sequence[Shard]], near: int = 0
) -> Iterator[tuple[str, list[BoxCopy]]]:
    """Yield for each tensor of a target rank the copies that fill it, every element once.

    ``near``: the source rank to prefer for boxes that several have, then those after it; different target ranks should
    not all ask the same one. Raises WeightError naming what no source rank has.
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
            first = bisect_left(asked, near, key=lambda entry: entry[0])
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
    """Return the intersection of two boxes, or None."""
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
    target = tensor[slices(box)]
    target.copy_(value.reshape(target.shape))
