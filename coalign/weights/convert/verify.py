"""Comparing what was written with what it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from coalign.weights.convert.plan import OPEN, Advance, ConversionOutput
from coalign.weights.convert.sources import OpenedCheckpoint, open_source, split_rows
from coalign.weights.layouts.shards import Box, Shard, ShardBox, Spec, overlap, plan, reshard
from coalign.weights.sync.transport import WeightError


def back(output: ConversionOutput, source: OpenedCheckpoint, folder: Path, advance: Advance) -> int:
    """Read ``folder`` as if it were a source, make from it what the files of the real source hold, and compare every
    element, bit for bit (after the cast, if the output has another dtype). Returns the number of tensors compared.

    Raises WeightError naming the first that differs. All ranks of a legacy checkpoint are compared, so ranks that
    should hold the same and do not are found too.
    """
    written = open_source(replace(output.request, source=folder, hf=None, pickles=False)).side
    fetch = lru_cache(OPEN)(written.fetch)
    specs = {name: Spec(each.shape, written.dtypes[name]) for name, each in output.specs.items()}
    held = [(rank, shard) for rank, shards in enumerate(source.side.ranks) for shard in shards]
    for rank, shard in held:
        own = source.side.fetch(rank, shard.name)
        parts = [(box, clip(shard, box)) for box in _boxes(shard, own.element_size())]
        moves = dict(plan([part for _, part in parts], written.ranks))
        for (box, part), (_, made) in zip(parts, reshard(specs, [p for _, p in parts], moves, fetch), strict=True):
            wanted = own[tuple(slice(*ends) for ends in box)].to(made.dtype)
            for piece in part.pieces:
                place = tuple(slice(*ends) for ends in piece.own)
                if not _same(made[place], wanted[place]):
                    raise WeightError(
                        f"'{piece.name}' {list(piece.full)} in {folder} is not what {output.request.source} has in "
                        f"'{shard.name}'"
                    )
            advance(made.nbytes)
    return len(held)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))


def _boxes(shard: Shard, itemsize: int) -> Iterator[Box]:
    """A shard in parts of a block each, cut in its first dimension that can be."""
    dim = next((i for i, size in enumerate(shard.shape) if size > 1), 0)
    for start, stop in split_rows(shard.shape[dim:], itemsize):
        yield tuple((start, stop) if i == dim else (0, size) for i, size in enumerate(shard.shape))


def clip(shard: Shard, box: Box) -> Shard:
    """A box of a shard, as a shard."""
    pieces = []
    for piece in shard.pieces:
        if (both := overlap(piece.own, box)) is not None:
            lead = len(piece.own) - len(piece.full)
            pairs = zip(both[lead:], piece.own[lead:], piece.full, strict=True)
            full = tuple((a - own[0] + there[0], b - own[0] + there[0]) for (a, b), own, there in pairs)
            own = tuple((a - start, b - start) for (a, b), (start, _) in zip(both, box, strict=True))
            pieces.append(ShardBox(piece.name, full, own))
    shape = tuple(stop - start for start, stop in box)
    return Shard(f"{shard.name}{list(box)}", shape, shard.like, tuple(pieces))
