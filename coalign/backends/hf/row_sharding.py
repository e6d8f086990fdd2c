"""Cuts a packed row over the ranks that compute it together.

Between two layers each rank has an equal chunk of the row. Attention needs the whole row: meanwhile, context-parallel
ranks exchange a chunk with all heads for the whole row with some heads (Ulysses, 2309.14509), so blocks, shared prompts
and windows are the same as on one rank. Log-probs are computed where the hidden states are, then gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from coalign.backends.packing import Block, Layout
from coalign.backends.process_group import AllToAll, Group, ScatterRows


@dataclass(frozen=True, slots=True)
class RankAxis:
    """One dimension in which a row is cut: this rank's number among the ``size`` ranks of ``group``."""

    rank: int = 0
    size: int = 1
    group: Group | None = None

    @classmethod
    def of(cls, group: Group) -> Self:
        return cls(group.rank(), group.size(), group)


@dataclass(frozen=True, slots=True)
class RowShard:
    """A rank's chunk of a row: a ``layout`` with the chunk's tokens, predictors and last tokens, and the row's blocks.
    ``indices``: for outputs of a `token` and of a `sequence`, the indices i64[n] of the chunk's values among those of
    the whole row, and the number of the latter."""

    layout: Layout
    indices: dict[str, tuple[Tensor, int]]


class HeadExchange:
    """Exchanges a chunk of the row with all heads for the whole row with some of the heads, and back."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def split_heads(self, x: Tensor) -> Tensor:
        """[1, heads, P / k, D] -> [1, heads / k, P, D]. Heads are repeated where there are fewer than ranks."""
        ranks, heads = self.group.size(), x.shape[1]
        if heads < ranks:
            x = x.repeat_interleave(ranks // heads, 1)
        return AllToAll.apply(x, self.group, 1, 2)

    def join_heads(self, x: Tensor) -> Tensor:
        """[1, P, heads / k, D] -> [1, P / k, heads, D]."""
        return AllToAll.apply(x, self.group, 1, 2)


class RowSharding:
    """Cuts rows over the ranks that compute them together: over ``context``, then each chunk over ``tensor``. The
    length of a chunk is a multiple of ``multiple``."""

    def __init__(self, context: RankAxis, tensor: RankAxis, *, multiple: int = 1) -> None:
        self.context, self.tensor, self.multiple = context, tensor, multiple
        self.ranks = context.size * tensor.size
        self.heads = HeadExchange(context.group) if context.group is not None and context.size > 1 else None

    def cut(self, layout: Layout) -> RowShard:
        """This rank's chunk. The row is padded, by a block that nothing reads, to a length that divides."""
        size = -(-len(layout.tokens) // (self.ranks * self.multiple)) * self.multiple
        more = size * self.ranks - len(layout.tokens)
        first_rank = self.context.rank * self.tensor.size
        start = (first_rank + self.tensor.rank) * size
        context = slice(first_rank * size, (first_rank + self.tensor.size) * size)
        trained, rows = ((at >= start) & (at < start + size) for at in (layout.predictors, layout.last))
        columns = {"tokens": layout.tokens, "copies": layout.copies, "experts": layout.experts}
        cut = {
            name: F.pad(x, (0, 0) * (x.dim() - 1) + (0, more), value=-(name == "experts"))[start : start + size]
            for name, x in columns.items()
            if x is not None
        }
        columns = {"targets": layout.targets, "segment": layout.segment, "candidates": layout.candidates}
        shard_layout = replace(
            layout,
            # Attention gathers the chunks of the tensor-parallel ranks, so rotary embeddings need positions for all.
            positions=F.pad(layout.positions, (0, more))[context],
            offset=start,
            axes=None if layout.axes is None else F.pad(layout.axes, (0, more))[:, context],
            blocks=layout.blocks + ((Block(len(layout.tokens), (more,)),) if more else ()),
            predictors=layout.predictors[trained] - start,
            last=layout.last[rows] - start,
            **cut,
            **{name: x[trained] for name, x in columns.items() if x is not None},
        )
        masks = {"token": trained, "sequence": rows}
        return RowShard(shard_layout, {name: (mask.nonzero().flatten(), len(mask)) for name, mask in masks.items()})

    def gather(self, outputs: dict[str, Tensor], shard: RowShard) -> dict[str, Tensor]:
        """The outputs for the whole row, on every rank, from each rank's outputs for its chunk."""
        groups = [axis.group for axis in (self.context, self.tensor) if axis.size > 1]
        result = {}
        for name, values in outputs.items():
            at, size = shard.indices["sequence" if name == "scores" else "token"]
            result[name] = ScatterRows.apply(values, at.to(values.device), size, *groups)
        return result
