"""Splits the rows of a batch into shards for workers, and puts what they answer back into the order of the batch.

The driver knows the lengths and groups of a batch, not its contents. That is enough to split the rows into shards that
take equally long, and to put the results back into order. Rows can also be taken before the call has ended: where
independent replicas answer one by one, the next model computes on the rows that are there (``stream_rows``). Which rows
are computed together depends on the numbers of replicas alone, never on which replica was first, so results are
reproducible.

For a trainer with `reduction: exact` the updates of a training step are also cut into leaves: micro-batches that do not
depend on the number of ranks. It computes them as they are cut here, and adds their gradients in the order of their
numbers (coalign.backends.hf.exact). Leaf n of an update goes to rank n modulo the number of ranks.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, pairwise
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef, Meta, Store, WorkerRows
from coalign.cluster.future import Call, Future, Outcome, WorkerHandle, WorkerTask
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch, estimate_costs, pack_rows, partition, split_ranges
from coalign.types import merge_stats

MAX_BUNDLES = 8  # bundles of rows that are streamed from one call
MAX_STREAM_CALLS = 256  # each bundle is a call on every replica that takes rows; there are two bundles at least
By = Literal["work", "cost", "order"]  # how a batch is split


class ShardRecord(Protocol):
    """Keeps the results of finished shards, so that a resumed run reuses them instead of computing them again."""

    def find(self, rows: BatchRef) -> tuple[Meta, Any] | None:
        """Return the Meta of the result for these rows, and the reference to it; None if none is kept."""
        ...

    def keep(self, rows: BatchRef, task: WorkerTask) -> None:
        """Keep the result of a task for these rows, once it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _LeafRows(WorkerRows):
    """The rows that a worker gets, and the leaf of its update to which each belongs: i32[N], a column of the batch."""

    leaf: np.ndarray | None = None

    def gather(self, store: Store) -> Batch:
        batch = WorkerRows.gather(self, store)
        return batch if self.leaf is None else batch.with_(leaf=torch.tensor(self.leaf))


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The ``update`` that uses each row of a batch, and the ``number`` of its leaf in that update (i32[N] both)."""

    update: Tensor
    number: Tensor

    def split(self, ranks: int) -> tuple[Tensor, ...]:
        """The rows i64 of each rank, in the order of the batch."""
        return tuple((self.number % ranks == rank).nonzero().flatten() for rank in range(ranks))

    def label(self, shards: Sequence[WorkerRows], rows: Sequence[Tensor]) -> list[WorkerRows]:
        """The shards of a batch, with the ``rows`` of each, as workers get them."""
        return [
            _LeafRows(s.payloads, s.which, s.rows, self.update[shard_rows].numpy(), self.number[shard_rows].numpy())
            for s, shard_rows in zip(shards, rows, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Shards:
    """A batch in shards: shard i has the rows ``rows[i]`` (i64) of the batch, in this order.

    ``updates`` i32[N], in a training step: the update to which each row of the batch belongs. ``leaves``: that, and
    how it is cut into micro-batches, if the driver does so.
    """

    batch: BatchRef
    rows: tuple[Tensor, ...]
    updates: Tensor | None = None
    leaves: _Leaves | None = None

    @property
    def batches(self) -> list[BatchRef]:
        return [self.batch.select(rows) for rows in self.rows]

    @property
    def worker_rows(self) -> list[WorkerRows]:
        """The shards as workers get them."""
        shards = [batch.worker_rows for batch in self.batches]
        if self.leaves is not None:
            return self.leaves.label(shards, self.rows)
        if self.updates is None:
            return shards
        pairs = zip(shards, self.rows, strict=True)
        return [replace(shard, update=self.updates[rows].numpy()) for shard, rows in pairs]

    def order(self, metas: Sequence[Meta]) -> Tensor | None:
        """How to put the concatenated results of the shards with rows into the order of the batch.

        Row i is row order[i] of the results; None if they are in order already. A worker returns a row for each of its
        rows, or (generation) rows of the same groups.
        """
        filled = [rows for rows in self.rows if len(rows)]
        if not filled or metas[0].lengths is None:
            return None
        groups = [meta.group for meta in metas if meta.group is not None]
        sizes = [len(meta.lengths) for meta in metas if meta.lengths is not None]
        if sizes == [len(rows) for rows in filled]:
            positions = torch.cat(filled)
        elif self.batch.group is not None and len(groups) == len(metas):
            positions = _first_rows(self.batch.group, torch.cat(groups))
        else:
            return None
        order = torch.argsort(positions, stable=True)
        return None if torch.equal(order, torch.arange(len(order))) else order


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """The calls of workers that one call of a model becomes: each with its rank, arguments and keywords.

    ``shards`` are those of its first batch, ``numbers`` those that the calls are for.
    """

    calls: Sequence[tuple[WorkerHandle, tuple[tuple[Any, ...], Mapping[str, Any]]]]
    shards: Shards | None = None
    numbers: Sequence[int] = ()

    def find_recorded(self, record: ShardRecord | None) -> dict[int, WorkerTask]:
        """Return finished tasks for the calls whose result ``record`` has, by their position."""
        tasks: dict[int, WorkerTask] = {}
        if record is None or self.shards is None:
            return tasks
        for position in range(len(self.calls)):
            if (answer := record.find(self._select_rows(position))) is not None:
                task = WorkerTask(self.calls[position][0].name, concurrent.futures.Future(), answer[1])
                task.meta.set_result(replace(answer[0], verb="call", start=task.submitted_at))
                tasks[position] = task
        return tasks

    def keep(self, record: ShardRecord | None, position: int, task: WorkerTask) -> None:
        """Let the record keep the result of a task of the call at this position."""
        if record is not None and self.shards is not None:
            record.keep(self._select_rows(position), task)

    def _select_rows(self, position: int) -> BatchRef:
        assert self.shards is not None, "a call without a batch has no rows"
        return self.shards.batch.select(self.shards.rows[self.numbers[position]])

    def restore_order(self, outcome: Outcome, metas: Sequence[Meta]) -> Outcome:
        """The outcome with its rows in the order of the batch; ``metas``: the answer for each of the ``numbers``."""
        if self.shards is None:
            return outcome
        filled = [meta for number, meta in zip(self.numbers, metas, strict=True) if len(self.shards.rows[number])]
        return reorder(outcome, self.shards.order(filled))


class Sharding:
    """Decides which rows go to which of a model's ``ranks``.

    Ranks of an SPMD model may have the same shard, since they compute its rows together; ``counted`` are the positions
    of those whose answers count (None: all). ``is_separable``: the rows of one shard are useful without the others.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Sequence[WorkerHandle],
        *,
        spmd: bool,
        keep_groups: bool,
        compares_groups: bool,
    ) -> None:
        """``keep_groups``: rows of a group are computed together. ``compares_groups``: so does the model's loss."""
        self.ranks = ranks
        self._config, self._spmd = config, spmd
        self._keep_groups, self._compares_groups = keep_groups, compares_groups
        self._shard_of_rank = config.shares(len(ranks)) if spmd else [*range(len(ranks))]
        self._shards = max(self._shard_of_rank) + 1
        self.counted = [self._shard_of_rank.index(shard) for shard in range(self._shards)] if spmd else None
        self.is_separable = not spmd and not config.spread_samples

    def split(
        self,
        call: Call,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        by: By,
        per_replica: int = 1,
        updates: int | None = None,
    ) -> ShardedCall:
        """Decide which rank gets which (arguments, keywords).

        Batches are split into ``per_replica`` shards per replica, each of a training step's ``updates`` separately.
        Batches among the positional arguments are split alike (see `check_same_rows`). Everything else is passed on
        unchanged.
        """
        values = {**dict(enumerate(arguments)), **keywords}
        batches = {key: value for key, value in values.items() if isinstance(value, BatchRef)}
        if not batches:
            return ShardedCall([(rank, (arguments, keywords)) for rank in self.ranks])
        check_same_rows(call, arguments)
        alike = [key for key in batches if key not in keywords]
        count, split = self._shards * per_replica, self._choose_split(by, updates, "loss" in keywords)
        shards = {key: split(batches[key], count) for key in batches if key in keywords or key == alike[0]}
        shards |= {key: replace(shards[alike[0]], batch=batches[key]) for key in alike}
        rows = {key: batch_shards.worker_rows for key, batch_shards in shards.items()}

        def build_call(shard: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            inputs = {key: rows[key][shard] if key in rows else value for key, value in values.items()}
            return tuple([inputs[i] for i in range(len(arguments))]), {name: inputs[name] for name in keywords}

        if self._spmd:  # all ranks meet in collectives, those with an empty shard, too
            pairs, numbers = zip(self.ranks, self._shard_of_rank, strict=True), [*range(count)]
        else:
            filled = [i for i in range(count) if any(len(batch_shards.rows[i]) for batch_shards in shards.values())]
            pairs, numbers = zip(cycle(self.ranks), range(count), strict=False), filled or [0]
        calls = [(rank, build_call(shard)) for rank, shard in pairs if shard in numbers]
        return ShardedCall(calls, next(iter(shards.values())), numbers)

    def _choose_split(self, by: By, updates: int | None, has_loss: bool) -> Callable[[BatchRef, int], Shards]:
        """``has_loss``: the call brings a loss, which may compare the samples of a group."""
        if by == "cost" and self._config.reduction == "exact":
            keep, max_tokens = self._compares_groups or has_loss, self._config.max_tokens_per_micro
            return partial(_shard_leaves, updates=updates or 1, max_tokens=max_tokens, keep_groups=keep)
        keep = not self._config.spread_samples if by == "work" else self._keep_groups or has_loss
        if updates:
            return partial(_shard_updates, updates=updates, keep_groups=keep)
        return partial(shard_rows, by=by, keep_groups=keep)


def check_same_rows(call: Call, arguments: Sequence[Any]) -> None:
    """ValueError unless the batches among the positional arguments of a call hold the same sequences."""
    if len(sizes := {len(value) for value in arguments if isinstance(value, BatchRef)}) > 1:
        raise ValueError(f"{call}: the batches hold {sorted(sizes)} sequences; expected the same ones in each")


def reorder(outcome: Outcome, order: Tensor | None) -> Outcome:
    """The outcome with row order[i] of its result as row i (None: unchanged)."""
    return outcome if order is None else replace(outcome, result=outcome.result.select(order), order=order)


def concat_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of several batches into that of their concatenation."""
    result = BatchRef.concat([outcome.result for outcome in outcomes])
    stats = merge_stats(outcome.stats for outcome in outcomes)
    return Outcome(result, stats, max(outcome.memory for outcome in outcomes))


def shard_rows(batch: BatchRef, count: int, by: By, *, keep_groups: bool = True) -> Shards:
    """Split a batch into ``count`` shards; ``keep_groups``: no group (equal neighbours in column `group`) is split.

    By ``work``: balances the expected cost of generation, the longest first in each shard, so that none is left for the
    end; without an estimate each shard gets neighbours, equally many. By ``cost``: balances the cost of a forward pass;
    a shard keeps the order of the batch, so on one rank nothing is moved. By ``order``: neighbours of equal tokens, for
    methods that may return other rows than they got.
    """
    keep = batch.group if keep_groups else None
    if by == "order" or batch.group is None or (by == "work" and batch.work is None):
        ranges = split_ranges(batch.lengths, count, keep=keep, by="sequences" if by == "work" else "tokens")
        return Shards(batch, tuple(torch.arange(start, stop) for start, stop in ranges))
    unit = torch.arange(len(batch)) if keep is None else torch.unique_consecutive(keep, return_inverse=True)[1]
    costs = batch.work.double() if by == "work" and batch.work is not None else estimate_costs(batch.lengths)
    sums = torch.zeros(int(unit[-1]) + 1 if len(unit) else 0, dtype=torch.float64).index_add_(0, unit, costs)
    shard_of, turn = torch.empty(len(sums), dtype=torch.int64), torch.arange(len(sums))
    for number, members in enumerate(partition(sums.tolist(), count)):
        shard_of[members] = number
    if by == "work":
        turn[torch.argsort(sums, descending=True, stable=True)] = turn.clone()
    rows = torch.argsort(shard_of[unit] * len(sums) + turn[unit], stable=True)
    return Shards(batch, rows.split(torch.bincount(shard_of[unit], minlength=count).tolist()))


def _shard_updates(batch: BatchRef, count: int, updates: int, *, keep_groups: bool = True) -> Shards:
    """Split the batch of a training step into ``count`` shards, each update separately and by cost.

    An update is a run of the batch as Batch.split cuts it (and as a module on one rank does), so its rows do not depend
    on ``count``.
    """
    ranges = split_ranges(batch.lengths, updates, keep=batch.group)
    split = [
        shard_rows(batch.slice(start, stop), count, "cost", keep_groups=keep_groups).rows for start, stop in ranges
    ]
    runs = [[start + rows for rows in update_rows] for (start, _), update_rows in zip(ranges, split, strict=True)]
    number = torch.arange(updates, dtype=torch.int32).repeat_interleave(torch.tensor([b - a for a, b in ranges]))
    return Shards(batch, tuple(torch.cat(shard) for shard in zip(*runs, strict=True)), number)


def _shard_leaves(
    batch: BatchRef, count: int, updates: int, max_tokens: int | None, *, keep_groups: bool = False
) -> Shards:
    """Deal the leaves of each update of a batch to ``count`` shards in turn, so that a leaf never depends on them."""
    leaves = _cut_leaves(batch, updates, max_tokens, keep_groups=keep_groups)
    return Shards(batch, leaves.split(count), leaves=leaves)


def _first_rows(group: Tensor, wanted: Tensor) -> Tensor:
    """The first row of each wanted group."""
    groups, member = torch.unique(group, return_inverse=True)
    first = torch.full((len(groups),), len(group)).scatter_reduce(0, member, torch.arange(len(group)), "amin")
    return first[torch.searchsorted(groups, wanted)]


def _cut_leaves(batch: BatchRef, updates: int, max_tokens: int | None, *, keep_groups: bool) -> _Leaves:
    """Cut ``batch`` into updates (as Batch.split does) and these into leaves (as Batch.micro does, which may raise).

    ``keep_groups``: no group is cut.
    """
    update, number = (torch.zeros(len(batch), dtype=torch.int32) for _ in range(2))
    for i, (start, stop) in enumerate(split_ranges(batch.lengths, updates, keep=batch.group)):
        groups = None if batch.group is None else batch.group[start:stop]
        update[start:stop] = i
        for leaf, rows in enumerate(pack_rows(batch.lengths[start:stop], max_tokens, keep=groups, intact=keep_groups)):
            number[start + torch.tensor(rows)] = leaf
    return _Leaves(update, number)


def is_streamed(call: Future) -> bool:
    """Whether the rows of this call's result come in chunks. Waits until its tasks have started."""
    return len(call.partial_results.result()) > 1


def stream_rows(call: Future, store: Store, takers: int) -> Iterator[dict[int, BatchRef]]:
    """Yield the rows of a call's result in bundles, as they come, for ``takers`` replicas of the next model.

    Each item has all bundles that are there, by position. Raises what the call raises.
    """
    results = call.partial_results.result()
    count = min(len(results), MAX_BUNDLES, max(2, MAX_STREAM_CALLS // takers))
    cuts = pairwise(len(results) * i // count for i in range(count + 1))
    missing = {position: results[start:stop] for position, (start, stop) in enumerate(cuts)}
    while missing:
        there = {position: futures for position, futures in missing.items() if all(future.done() for future in futures)}
        if not there:
            waiting = [future for future in chain(*missing.values()) if not future.done()]
            concurrent.futures.wait([cast(Any, call.ended), *waiting], return_when=concurrent.futures.FIRST_COMPLETED)
        done = {position: [future.result() for future in futures] for position, futures in there.items()}
        metas = [task.meta for task in chain(*done.values())]
        if call.done() or any(meta.exception() or meta.result().failure for meta in metas):
            call.result()  # raises, if anything went wrong
        if done:
            yield {
                position: BatchRef.concat([BatchRef.of(task.meta.result(), task.payload, store) for task in tasks])
                for position, tasks in done.items()
            }
            missing = {position: futures for position, futures in missing.items() if position not in done}
