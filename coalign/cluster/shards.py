"""Splits a batch over replicas, waits for their tasks, and merges the answers in the order of the batch.

The driver knows the lengths and groups of a batch, not its contents. That is enough to split the rows into shards that
take equally long, and to put the results back into order.

Rows can also be taken before the whole call has ended: where independent replicas answer one by one, the next model
computes on the rows that are there (``stream_rows``). Which rows are computed together depends on the numbers of
replicas alone, never on which replica was first, so results are reproducible.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from coalign.cluster.future import (
    BatchRef,
    Call,
    Future,
    Meta,
    Outcome,
    Span,
    Store,
    WorkerError,
    WorkerFailure,
    WorkerRows,
)
from coalign.data.balance import estimate_costs, partition
from coalign.data.batch import split_ranges
from coalign.types import merge_stats

MAX_BUNDLES = 8  # of rows that are streamed from one call
MAX_STREAM_CALLS = 256  # each bundle is a call on every replica that takes rows; there are two bundles at least
LOAD_SECONDS = 3600.0  # a model may take this long to load, whatever runtime.call_timeout says
LEAST_SECONDS = 3600.0  # without runtime.call_timeout: what every call may take
LONGEST_TIMES = 10.0  # and how many times the longest call of its kind so far


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A verb that runs in one worker: the future of its Meta, and the reference under which its payload is stored.

    The future raises only if the worker itself is lost. ``since``: when the task was submitted, in seconds since the
    epoch; ``begun``: by the monotonic clock.
    """

    where: str
    meta: concurrent.futures.Future[Meta]
    payload: Any
    since: float = field(default_factory=time.time)
    begun: float = field(default_factory=time.monotonic)


TaskFuture = concurrent.futures.Future[WorkerTask]  # a task, once it is done


class WorkerHandle(Protocol):
    """A handle to one worker, in whichever process. ``where`` is its name in errors."""

    where: str

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        """Start a verb of coalign.cluster.worker.Worker there."""
        ...

    def execute_all(self, verbs: Sequence[tuple[Any, ...]]) -> list[WorkerTask]:
        """Start several verbs (each with its arguments) there, with nothing else in between."""
        ...


class CallDeadlines:
    """Decides how many seconds workers may take to answer a call, by its model and method.

    ``limit`` is `runtime.call_timeout`. Without one, the deadline grows with the calls: a hang is certain only beyond
    what calls of this kind have taken.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._longest: dict[Call, float] = {}

    def find(self, call: Call) -> float:
        """Return the seconds that a call may take."""
        if self.limit is None:
            return max(LEAST_SECONDS, LONGEST_TIMES * self._longest.get(call, 0.0))
        return max(self.limit, LOAD_SECONDS) if call.method == "setup" else self.limit

    def record(self, call: Call, tasks: Sequence[WorkerTask]) -> None:
        """Record that these tasks of a call have been answered."""
        seconds = time.monotonic() - min((task.begun for task in tasks), default=math.inf)
        self._longest[call] = max(self._longest.get(call, 0.0), seconds)

    def build_error(self, future: Future, tasks: Sequence[WorkerTask]) -> WorkerError:
        """Build the error of workers that have not answered in time."""
        late = ", ".join(task.where for task in tasks if not task.meta.done())
        source = "" if self.limit else f"; not set: {LEAST_SECONDS:g} s, or {LONGEST_TIMES:g} times its longest call"
        message = f"no answer within {self.find(future.call):g} s (runtime.call_timeout{source})"
        return WorkerError(future.call, late, WorkerFailure("TimeoutError", message, ""))


def wait(future: Future, tasks: Sequence[WorkerTask], deadlines: CallDeadlines) -> list[Meta]:
    """Wait for all tasks and return their Metas, in order.

    WorkerError once a task failed, a worker was lost, or the call's deadline is over. If an error of the run ends
    ``future``, that error.
    """
    future.running = [*tasks]
    where = {task.meta: task.where for task in tasks}
    try:
        either = [*where, cast(Any, future.ended)] if where else []
        for count, done in enumerate(concurrent.futures.as_completed(either, deadlines.find(future.call)), 1):
            if done is future.ended:
                done.result()  # raises
            if lost := done.exception():
                raise WorkerError(future.call, where[done], WorkerFailure("worker lost", str(lost).strip(), ""))
            if failure := done.result().failure:
                raise WorkerError(future.call, where[done], failure) from failure.exception
            if count == len(where):
                break
    except TimeoutError:
        raise deadlines.build_error(future, tasks) from None
    deadlines.record(future.call, tasks)
    metas = [task.meta.result() for task in tasks]
    pairs = zip(tasks, metas, strict=True)
    future.spans += [Span(task.where, meta.verb, meta.start, meta.seconds) for task, meta in pairs]
    return metas


def merge_parts(metas: Sequence[Meta], counts: Sequence[int]) -> list[Meta]:
    """Merge the Metas of results that came in several parts: ``counts[i]`` neighbouring Metas become one."""
    merged = []
    for start, stop in pairwise(accumulate(counts, initial=0)):
        parts = metas[start:stop]
        groups = [part.group for part in parts if part.group is not None]
        lengths = [part.lengths for part in parts if part.lengths is not None]
        rows = (
            {"lengths": torch.cat(lengths), "group": torch.cat(groups) if groups else None} if stop - start > 1 else {}
        )
        merged.append(replace(parts[0], **rows))
    return merged


def merge_answers(
    tasks: Sequence[WorkerTask], metas: Sequence[Meta], store: Store, counted: Sequence[int] | None = None
) -> Outcome:
    """Merge the answers to one call: a BatchRef in this order, merged Stats, or the first worker's plain value.

    ``counted``: positions that count (None: all), since ranks that compute the same rows give the same answer.
    """
    parts = [(tasks[i], metas[i]) for i in (range(len(metas)) if counted is None else counted)]
    stats = merge_stats(meta.stats or {} for _, meta in parts)
    first = metas[0]
    if first.lengths is not None:
        result: Any = BatchRef.concat([BatchRef.of(meta, task.payload, store) for task, meta in parts])
    else:
        result = first.value if first.stats is None else stats
    return Outcome(result, stats, max(meta.memory for meta in metas))


def watch_task(task: WorkerTask) -> TaskFuture:
    """A future that gives the task once its worker has answered."""
    future: TaskFuture = concurrent.futures.Future()
    task.meta.add_done_callback(lambda _: future.set_result(task))
    return future


def is_streamed(call: Future) -> bool:
    """Whether the rows of this call's result come in parts. Waits until its tasks have started."""
    return len(call.partial_results.result()) > 1


def stream_rows(call: Future, store: Store, takers: int) -> Iterator[dict[int, BatchRef]]:
    """Yield the rows of a call's result in bundles, as they come, for ``takers`` replicas of the next model.

    Each item has all bundles that are there, by position. Raises what the call raises.
    """
    parts = call.partial_results.result()
    count = min(len(parts), MAX_BUNDLES, max(2, MAX_STREAM_CALLS // takers))
    cuts = pairwise(len(parts) * i // count for i in range(count + 1))
    missing = {position: parts[start:stop] for position, (start, stop) in enumerate(cuts)}
    while missing:
        there = {position: futures for position, futures in missing.items() if all(each.done() for each in futures)}
        if not there:
            waiting = [future for future in chain(*missing.values()) if not future.done()]
            concurrent.futures.wait([cast(Any, call.ended), *waiting], return_when=concurrent.futures.FIRST_COMPLETED)
        done = {position: [future.result() for future in futures] for position, futures in there.items()}
        if call.done() or any(_has_failed(task) for task in chain(*done.values())):
            call.result()  # raises, if anything went wrong
        if done:
            yield {
                position: BatchRef.concat([BatchRef.of(task.meta.result(), task.payload, store) for task in tasks])
                for position, tasks in done.items()
            }
            missing = {position: futures for position, futures in missing.items() if position not in done}


def _has_failed(task: WorkerTask) -> bool:
    return task.meta.exception() is not None or task.meta.result().failure is not None


By = Literal["work", "cost", "order"]


@dataclass(frozen=True, slots=True)
class Shards:
    """A batch in shards: shard i has the rows ``rows[i]`` (i64) of the batch, in this order.

    ``updates`` i32[N], in a training step: the update to which each row of the batch belongs.
    """

    batch: BatchRef
    rows: tuple[Tensor, ...]
    updates: Tensor | None = None

    @property
    def parts(self) -> list[BatchRef]:
        return [self.batch.select(rows) for rows in self.rows]

    @property
    def worker_rows(self) -> list[WorkerRows]:
        """The shards as workers get them."""
        shards = [part.worker_rows for part in self.parts]
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
            place = torch.cat(filled)
        elif self.batch.group is not None and len(groups) == len(metas):
            place = _first_rows(self.batch.group, torch.cat(groups))
        else:
            return None
        order = torch.argsort(place, stable=True)
        return None if torch.equal(order, torch.arange(len(order))) else order


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """The calls of workers that one call of a model becomes: each with its rank, arguments and keywords.

    ``shards`` are those of its first batch, ``numbers`` those that the calls are for.
    """

    calls: Sequence[tuple[WorkerHandle, tuple[tuple[Any, ...], dict[str, Any]]]]
    shards: Shards | None = None
    numbers: Sequence[int] = ()

    def restore_order(self, outcome: Outcome, metas: Sequence[Meta]) -> Outcome:
        """The outcome with its rows in the order of the batch; ``metas``: the answer for each of the ``numbers``."""
        if self.shards is None:
            return outcome
        filled = [meta for number, meta in zip(self.numbers, metas, strict=True) if len(self.shards.rows[number])]
        return reorder(outcome, self.shards.order(filled))


def reorder(outcome: Outcome, order: Tensor | None) -> Outcome:
    """The outcome with row order[i] of its result as row i (None: unchanged)."""
    return outcome if order is None else replace(outcome, result=outcome.result.select(order), order=order)


def concat_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of several batches into that of their concatenation."""
    result = BatchRef.concat([outcome.result for outcome in outcomes])
    stats = merge_stats(outcome.stats for outcome in outcomes)
    return Outcome(result, stats, max(outcome.memory for outcome in outcomes))


def shard_rows(batch: BatchRef, parts: int, by: By, *, whole_groups: bool = True) -> Shards:
    """Split a batch into ``parts`` shards; ``whole_groups``: no group (equal neighbours in column `group`) is split.

    By ``work``: balances the expected cost of generation, the longest first in each shard, so that none is left for the
    end; without an estimate each shard gets neighbours, equally many. By ``cost``: balances the cost of a forward pass;
    a shard keeps the order of the batch, so on one rank nothing is moved. By ``order``: neighbours of equal tokens, for
    methods that may return other rows than they got.
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
    """Split the batch of a training step into ``parts`` shards, each update on its own and by cost.

    An update is a run of the batch as Batch.split cuts it (and as a module on one rank does), so its rows do not depend
    on ``parts``.
    """
    ranges = split_ranges(batch.lengths, updates, keep=batch.group)
    split = [
        shard_rows(batch.slice(start, stop), parts, "cost", whole_groups=whole_groups).rows for start, stop in ranges
    ]
    runs = [[start + rows for rows in each] for (start, _), each in zip(ranges, split, strict=True)]
    number = torch.arange(updates, dtype=torch.int32).repeat_interleave(torch.tensor([b - a for a, b in ranges]))
    return Shards(batch, tuple(torch.cat(own) for own in zip(*runs, strict=True)), number)


def _first_rows(group: Tensor, wanted: Tensor) -> Tensor:
    """The first row of each wanted group."""
    groups, member = torch.unique(group, return_inverse=True)
    first = torch.full((len(groups),), len(group)).scatter_reduce(0, member, torch.arange(len(group)), "amin")
    return first[torch.searchsorted(groups, wanted)]
