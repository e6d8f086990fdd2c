"""Which replica gets which rows of a batch, and the order of what replicas give back.

A driver knows lengths and groups of a batch, not its contents: enough to deal its rows out in shares that take equally
long, and to put the results into the order of the batch again, whoever computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coalign.cluster.answers import WorkerHandle
from coalign.cluster.future import BatchRef, Meta, Outcome, WorkerRows
from coalign.data.balance import estimate_costs, partition
from coalign.data.batch import split_ranges
from coalign.types import merge_stats

By = Literal["work", "cost", "order"]


@dataclass(frozen=True, slots=True)
class Shards:
    """``rows[p]`` (i64) are those of part p, in the order in which it gets them; ``updates`` i32[N], of a training
    step: which of its updates each row of the batch is for."""

    given: BatchRef
    rows: tuple[Tensor, ...]
    updates: Tensor | None = None

    @property
    def parts(self) -> list[BatchRef]:
        return [self.given.select(rows) for rows in self.rows]

    @property
    def shares(self) -> list[WorkerRows]:
        """What each part gets."""
        shares = [part.share for part in self.parts]
        if self.updates is None:
            return shares
        pairs = zip(shares, self.rows, strict=True)
        return [replace(share, update=self.updates[rows].numpy()) for share, rows in pairs]

    def order(self, metas: Sequence[Meta]) -> Tensor | None:
        """What the parts that got any rows gave, one after the other, in the order of the batch: row i of the result is
        row order[i] of that. None if nothing is to be moved.

        A part gives a row for each of its rows, or (generation) rows of the same groups.
        """
        dealt = [rows for rows in self.rows if len(rows)]
        if not dealt or metas[0].lengths is None:
            return None
        groups = [meta.group for meta in metas if meta.group is not None]
        sizes = [len(meta.lengths) for meta in metas if meta.lengths is not None]
        if sizes == [len(rows) for rows in dealt]:
            place = torch.cat(dealt)
        elif self.given.group is not None and len(groups) == len(metas):
            place = _first_rows(self.given.group, torch.cat(groups))
        else:
            return None
        order = torch.argsort(place, stable=True)
        return None if torch.equal(order, torch.arange(len(order))) else order


@dataclass(frozen=True, slots=True)
class Shares:
    """The calls that one call becomes: which rank gets which arguments. ``parts`` are those of ``deal`` (that of its
    first batch) that they are for."""

    calls: Sequence[tuple[WorkerHandle, tuple[Any, ...]]]
    deal: Shards | None = None
    parts: Sequence[int] = ()

    def restored(self, outcome: Outcome, metas: Sequence[Meta]) -> Outcome:
        """The outcome with its rows in the order of the batch; ``metas``: the answer for each part."""
        if self.deal is None:
            return outcome
        told = [meta for part, meta in zip(self.parts, metas, strict=True) if len(self.deal.rows[part])]
        return in_order(outcome, self.deal.order(told))


def in_order(outcome: Outcome, order: Tensor | None) -> Outcome:
    """The outcome with row order[i] of its result as row i (None: as it is)."""
    return outcome if order is None else replace(outcome, result=outcome.result.select(order), order=order)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Outcomes for one batch after the other as that of all."""
    result = BatchRef.concat([outcome.result for outcome in outcomes])
    stats = merge_stats(outcome.stats for outcome in outcomes)
    return Outcome(result, stats, max(outcome.memory for outcome in outcomes))


def shard_rows(batch: BatchRef, parts: int, by: By, *, whole_groups: bool = True) -> Shards:
    """The rows in ``parts`` shares, with ``whole_groups`` the groups in one piece (equal neighbours in column `group`).

    By ``work``: what it takes to generate, and in each share the longest first, so that no long one is left for the
    end; prompts of which nothing is known are cut into neighbours by their number. By ``cost``: what it takes to
    compute; a part keeps its rows in the order of the batch, so on one rank nothing is moved. By ``order``: neighbours
    of equal tokens, for methods that may give back other rows than they got.
    """
    keep = batch.group if whole_groups else None
    if by == "order" or batch.group is None or (by == "work" and batch.work is None):
        ranges = split_ranges(batch.lengths, parts, keep=keep, by="sequences" if by == "work" else "tokens")
        return Shards(batch, tuple(torch.arange(start, stop) for start, stop in ranges))
    unit = torch.arange(len(batch)) if keep is None else torch.unique_consecutive(keep, return_inverse=True)[1]
    costs = batch.work.double() if by == "work" and batch.work is not None else estimate_costs(batch.lengths)
    sums = torch.zeros(int(unit[-1]) + 1 if len(unit) else 0, dtype=torch.float64).index_add_(0, unit, costs)
    part, turn = torch.empty(len(sums), dtype=torch.int64), torch.arange(len(sums))
    for number, members in enumerate(partition(sums.tolist(), parts)):
        part[members] = number
    if by == "work":
        turn[torch.argsort(sums, descending=True, stable=True)] = turn.clone()
    rows = torch.argsort(part[unit] * len(sums) + turn[unit], stable=True)
    return Shards(batch, rows.split(torch.bincount(part[unit], minlength=parts).tolist()))


def shard_updates(batch: BatchRef, parts: int, updates: int, *, whole_groups: bool = True) -> Shards:
    """The rows of a training step of so many ``updates``. Each of these is a run of the batch, as Batch.split cuts it
    (which is what a module does that is alone), and dealt out by cost on its own: what it learns from does not depend
    on ``parts``."""
    ranges = split_ranges(batch.lengths, updates, keep=batch.group)
    dealt = [
        shard_rows(batch.slice(start, stop), parts, "cost", whole_groups=whole_groups).rows for start, stop in ranges
    ]
    runs = [[start + rows for rows in each] for (start, _), each in zip(ranges, dealt, strict=True)]
    number = torch.arange(updates, dtype=torch.int32).repeat_interleave(torch.tensor([b - a for a, b in ranges]))
    return Shards(batch, tuple(torch.cat(of_part) for of_part in zip(*runs, strict=True)), number)


def _first_rows(group: Tensor, wanted: Tensor) -> Tensor:
    """The first row of each wanted group."""
    groups, member = torch.unique(group, return_inverse=True)
    first = torch.full((len(groups),), len(group)).scatter_reduce(0, member, torch.arange(len(group)), "amin")
    return first[torch.searchsorted(groups, wanted)]
