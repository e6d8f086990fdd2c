"""Comparison of a conversion's output with its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from coalign.weights.convert.plan import OPEN, Advance, ConversionOutput, split_rows
from coalign.weights.convert.sources import OpenedCheckpoint, open_source
from coalign.weights.layouts.shards import Box, Shard, ShardBox, TensorSpec, overlap, plan, reshard
from coalign.weights.sync.transport import WeightError


def compare_with_source(output: ConversionOutput, source: OpenedCheckpoint, folder: Path, advance: Advance) -> int:
    """Convert the output in ``folder`` back, and compare every element with the source's, bit for bit.

    If the output has another dtype, the source's elements are cast first. Returns the number of tensors compared.
    Raises WeightError naming the first that differs. All ranks of a legacy checkpoint are compared, so a difference
    between copies of the same weight is found too.
    """
    written = open_source(replace(output.request, source=folder, hf=None, pickles=False)).weights
    fetch = lru_cache(OPEN)(written.fetch)
    specs = {name: TensorSpec(each.shape, written.dtypes[name]) for name, each in output.specs.items()}
    held = [(rank, shard) for rank, shards in enumerate(source.weights.ranks) for shard in shards]
    for rank, shard in held:
        own = source.weights.fetch(rank, shard.name)
        parts = [(box, _clip(shard, box)) for box in _boxes(shard, own.element_size())]
        moves = dict(plan([part for _, part in parts], written.ranks))
        for (box, part), (_, tensor) in zip(parts, reshard(specs, [p for _, p in parts], moves, fetch), strict=True):
            expected = own[tuple(slice(*ends) for ends in box)].to(tensor.dtype)
            for piece in part.pieces:
                place = tuple(slice(*ends) for ends in piece.own)
                if not _same(tensor[place], expected[place]):
                    raise WeightError(
                        f"'{piece.name}' {list(piece.full)} in {folder} differs from '{shard.name}' in "
                        f"{output.request.source}"
                    )
            advance(tensor.nbytes)
    return len(held)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))


def _boxes(shard: Shard, itemsize: int) -> Iterator[Box]:
    """Split a shard into blocks along its first dimension of more than one row."""
    dim = next((i for i, size in enumerate(shard.shape) if size > 1), 0)
    for start, stop in split_rows(shard.shape[dim:], itemsize):
        yield tuple((start, stop) if i == dim else (0, size) for i, size in enumerate(shard.shape))


def _clip(shard: Shard, box: Box) -> Shard:
    """Return a box of a shard as a shard."""
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
