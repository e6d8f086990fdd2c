"""Continuous generation: replicas compute in slices, and take new rows and new weights between two of them.

A call of ``generate`` becomes shares of rows. A replica takes a share when none of its samples waits for a place in the
batch and no other replica has fewer rows. It keeps it until all of its samples are complete. Nobody waits for a
complete rollout: the next share, a weight sync or an evaluation waits for one slice.

The shares of a replica that is lost go to others, and a new process takes its place. It has no weights, so it takes
shares after the next weight sync.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from coalign.cluster.batch_ref import WorkerRows
from coalign.cluster.batch_shards import ShardedCall, ShardRecord
from coalign.cluster.choice import plan_slots
from coalign.cluster.future import (
    Call,
    CallDeadlines,
    Future,
    Outcome,
    Span,
    TaskFuture,
    WorkerError,
    WorkerHandle,
    WorkerLost,
    WorkerTask,
    merge_answers,
    wait,
)
from coalign.config.schema import RunConfig
from coalign.roles import Rollout
from coalign.threads import start_thread

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel
    from coalign.cluster.executor import ModelCall
    from coalign.launch.plan import PlannedModel

SLICE_SECONDS = 0.05  # a worker computes at most this long before it looks for new rows and weights
GATHER_SECONDS = 0.005  # an idle replica waits this long for further rows after the first ones
MAX_LOSSES = 3  # replicas lost over the same rows: then the rows are the cause
_GAP_SECONDS = 0.02  # between two slices that a timeline shows as one


@dataclass(eq=False, slots=True)
class _RowShare:
    """Rows that one replica generates for a ``call``.

    ``syncs``: weight syncs that must have ended before it begins. ``urgent``: it goes before shares that are not.
    """

    call: Future
    rows: WorkerRows
    options: Mapping[str, Any]
    syncs: int
    urgent: bool = False
    losses: int = 0  # replicas that were lost while they had it
    done: TaskFuture = field(default_factory=concurrent.futures.Future)

    @property
    def size(self) -> int:
        return len(self.rows.rows)


class SliceScheduler:
    """Keeps the replicas of one model generating, each by a thread of its own.

    ``max_in_flight``: slices that may be under way at a replica, so that it does not idle while an answer travels.
    ``replace(rank, error)`` starts a new process for a lost one, or raises the error that ends the run; None: no device
    is free for one, and the others go on without it.
    """

    def __init__(
        self,
        call: Call,
        ranks: Sequence[WorkerHandle],
        deadlines: CallDeadlines,
        max_in_flight: int,
        replace: Callable[[WorkerHandle, WorkerLost], WorkerHandle | None],
    ) -> None:
        self._call = call  # in errors
        self._replace = replace
        self._deadlines = deadlines
        self._max_in_flight = max_in_flight
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_RowShare] = deque()
        self._open = [0] * len(ranks)  # rows that each replica has
        self._names = [rank.name for rank in ranks]
        self._announced = self._served = 0  # weight syncs that began, and that all replicas have ended
        self._joining: set[int] = set()  # replicas without weights
        self._leaving: dict[int, Callable[[], None]] = {}  # replicas that take no more shares; what to do at their end
        self._taking: set[int] = set()  # replicas that get their first weights by the sync under way
        self._lost: dict[int, WorkerLost] = {}  # replicas that no process has replaced yet
        self._replaced: dict[int, float] = {}  # when a replica was replaced last
        self._error: Exception | None = None  # the error that ended a replica's thread
        self._closed = False
        self._numbers = itertools.count()
        self._threads = [
            start_thread(partial(self._feed, replica, rank), f"coalign-{call}-{replica}")
            for replica, rank in enumerate(ranks)
        ]

    @property
    def syncs(self) -> int:
        """The number of weight syncs that have begun."""
        return self._announced

    def begin_sync(self) -> None:
        """Hold shares of later calls back until ``end_sync``: they are for the new weights."""
        with self._changed:
            self._announced += 1
            self._taking = set(self._joining)

    def end_sync(self) -> None:
        """Start the shares that waited for the weights which all replicas have now."""
        with self._changed:
            self._served = self._announced
            self._joining -= self._taking
            self._changed.notify_all()

    @property
    def joining(self) -> bool:
        """Whether a replica waits for its first weights."""
        return bool(self._joining)

    def recover(self, error: WorkerError, since: float) -> bool:
        """Replace the replicas that a sync, begun at ``since`` (monotonic), has lost; return when they take weights.

        Returns False for any other ``error``. Raises the error that ends the run.
        """
        if not isinstance(error, WorkerLost) or error.call.model != self._call.model:
            return False
        with self._changed:
            for replica, name in enumerate(self._names):
                if name in error.workers and self._replaced.get(replica, -math.inf) < since:
                    self._lost[replica] = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or self._closed or not self._lost)
            if self._error:
                raise self._error
            self._taking = set(self._joining)
            return True

    def add(self, rank: WorkerHandle) -> None:
        """Let one more replica take shares, once it has the next weights."""
        with self._changed:
            replica = len(self._open)
            self._open.append(0)
            self._names.append(rank.name)
            self._joining.add(replica)
            self._threads.append(start_thread(partial(self._feed, replica, rank), f"coalign-{self._call}-{replica}"))

    def retire(self, rank: WorkerHandle, on_end: Callable[[], None]) -> None:
        """Let a replica take no more shares; call ``on_end`` when its last one is complete."""
        with self._changed:
            replica = max(number for number, name in enumerate(self._names) if name == rank.name)
            self._leaving[replica] = on_end
            self._names[replica] = ""
            self._joining.discard(replica)
            self._changed.notify_all()

    def submit(self, shares: Sequence[_RowShare]) -> None:
        """Generate these shares; each one's ``done`` gets the worker's task, or raises what a worker raised.

        Raises the error that has ended a replica for good.
        """
        with self._changed:
            if self._error:
                raise self._error
            if shares and shares[0].urgent:
                self._waiting.extendleft(reversed(shares))
            else:
                self._waiting.extend(shares)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads; slices under way are not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the threads have ended: each after its slice, or after the process that it starts again."""
        for thread in self._threads:
            thread.join()

    # ---- one replica -----------------------------------------------------------------------------------------------

    def _feed(self, replica: int, rank: WorkerHandle) -> None:
        """Give a replica slice after slice, and replace it when it is lost."""
        while True:
            shares: dict[int, _RowShare] = {}  # those that the replica has taken
            try:
                self._run_slices(replica, rank, shares)
                if replica in self._leaving:
                    self._leaving[replica]()
                return
            except WorkerLost as lost:
                try:
                    self._return_shares(replica, lost, shares)
                    if replica in self._leaving:
                        continue
                    if (new := self._replace_lost(replica, rank, lost)) is None:
                        return
                    rank = new
                    continue
                except Exception as error:
                    failed = error
            except Exception as error:
                failed = error
            self._end(failed, shares)
            return

    def _run_slices(self, replica: int, rank: WorkerHandle, shares: dict[int, _RowShare]) -> None:
        slices: deque[WorkerTask] = deque()  # under way
        queued = 0  # samples at the replica that wait for a place in its batch
        while (new := self._take(replica, idle=not shares and not slices, room=not queued)) is not None:
            taken = {next(self._numbers): share for share in new}
            shares |= taken
            if shares:
                rows = [(number, share.rows, share.options) for number, share in taken.items()]
                slices.append(rank.execute("roll", rows, SLICE_SECONDS))
            if len(slices) == self._max_in_flight or not shares:
                task = slices.popleft()
                number, queued = self._wait(task, next(iter(shares.values()), None))
                if number is not None:
                    self._finish(replica, shares.pop(number), task)

    def _return_shares(self, replica: int, lost: WorkerLost, shares: dict[int, _RowShare]) -> None:
        """Give the shares of a lost replica to others. Raises ``lost`` if they have cost too many replicas."""
        with self._changed:
            for share in shares.values():
                share.losses += 1
                if share.losses == MAX_LOSSES:
                    raise lost
            self._open[replica] = 0
            self._waiting.extendleft(reversed(shares.values()))
            shares.clear()
            self._changed.notify_all()

    def _replace_lost(self, replica: int, rank: WorkerHandle, lost: WorkerLost) -> WorkerHandle | None:
        """Return the process that replaces a lost one; None: the replica takes no more shares. Raises WorkerError."""
        with self._changed:
            self._lost[replica] = lost
            self._joining.add(replica)
            self._taking.discard(replica)
            self._changed.notify_all()
        new = self._replace(rank, lost)
        with self._changed:
            del self._lost[replica]
            self._replaced[replica] = time.monotonic()
            self._names[replica] = "" if new is None else new.name
            if new is None:
                self._leaving[replica] = lambda: None
                self._joining.discard(replica)
            self._changed.notify_all()
        return new

    def _end(self, error: Exception, shares: Mapping[int, _RowShare]) -> None:
        """Let every call that waits for rows see the error."""
        with self._changed:
            self._error = error
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for share in (*shares.values(), *waiting):
            share.done.set_exception(error)

    def _take(self, replica: int, *, idle: bool, room: bool) -> list[_RowShare] | None:
        """Take shares that the replica should begin; wait for some while it is ``idle``. None: the scheduler ends."""
        with self._changed:
            taken: list[_RowShare] = []
            while not self._closed:
                if replica in self._lost:
                    raise self._lost[replica]
                if replica in self._leaving:
                    return None if idle else taken
                previous = len(taken)
                while room and (share := self._find_next(replica)) is not None:
                    self._waiting.remove(share)
                    self._open[replica] += share.size
                    taken.append(share)
                if not idle or (taken and len(taken) == previous):
                    return taken
                self._changed.wait(GATHER_SECONDS if taken else None)
            return None

    def _find_next(self, replica: int) -> _RowShare | None:
        """Return the next share whose weights are there, if no other replica has fewer rows."""
        absent = self._joining.union(self._leaving)
        open_rows = [rows for number, rows in enumerate(self._open) if number not in absent]
        if replica in self._joining or self._open[replica] > min(open_rows):
            return None
        return next((share for share in self._waiting if share.syncs <= self._served), None)

    def _wait(self, task: WorkerTask, oldest: _RowShare | None) -> tuple[int | None, int]:
        """Wait for a slice; return the number of the share that it completed, and the samples that wait for a place.

        The slice is shown as work of the ``oldest`` share's call. Raises WorkerError.
        """
        if oldest is not None:
            oldest.call.running = [task]
        slice_ = Future(self._call)
        [meta] = wait(slice_, [task], self._deadlines)
        if oldest is not None:
            _add_span(oldest.call.spans, slice_.spans[0])
        return meta.value

    def _finish(self, replica: int, share: _RowShare, task: WorkerTask) -> None:
        with self._changed:
            self._open[replica] -= share.size
            self._changed.notify_all()
        share.done.set_result(task)


class Sliced:
    """Generates while the trainer trains: a call's shares go to the ``scheduler``, which may have those of others."""

    def __init__(self, model: DistModel[Any], scheduler: SliceScheduler) -> None:
        self._model, self.scheduler = model, scheduler

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        """Submit the call's shares, wait for all of them, and merge what they return."""
        future.set_partial_results([])
        syncs, model = self.scheduler.syncs, self._model
        call = call.resolve(model.cluster.resolve)
        [batch] = call.arguments
        per_replica = model.config.shares_per_replica
        sharded = model.sharding.split(future.call, call.arguments, call.keywords, call.by, per_replica)
        urgent = batch.group is not None and bool((batch.group < 0).any())  # the loop waits for evaluations
        shares = [_RowShare(future, rows, options, syncs, urgent) for _, ((rows,), options) in sharded.calls]
        recorded = sharded.find_recorded(call.record)
        for number, share in enumerate(shares):
            if number in recorded:
                share.done.set_result(recorded[number])
            elif call.record is not None:
                share.done.add_done_callback(partial(_keep_share, sharded, call.record, number))
        self.scheduler.submit([share for number, share in enumerate(shares) if number not in recorded])
        for share in shares:
            concurrent.futures.wait([share.done, cast(Any, future.ended)], None, concurrent.futures.FIRST_COMPLETED)
            if future.done():
                future.result()  # raises
        tasks = [share.done.result() for share in shares]
        metas = [task.meta.result() for task in tasks]
        return sharded.restore_order(merge_answers(tasks, metas, model.store), metas)


def _keep_share(sharded: ShardedCall, record: ShardRecord, position: int, done: TaskFuture) -> None:
    if done.exception() is None:
        sharded.keep(record, position, done.result())


def _add_span(spans: list[Span], new: Span) -> None:
    """Add a slice; if it continues the worker's last one, that span grows instead."""
    for index, span in enumerate(spans):
        if span.worker == new.worker and abs(new.start - span.start - span.seconds) < _GAP_SECONDS:
            spans[index] = replace(span, seconds=new.start + new.seconds - span.start)
            return
    spans.append(new)


def check_staleness(syncs: Sequence[tuple[str, str]], models: Mapping[str, PlannedModel], config: RunConfig) -> None:
    """Refuse (ValueError) `runtime.max_staleness` where a policy cannot generate while its trainer trains."""
    for key, unset in (("round_tokens", None), ("oversample", 1.0)):
        if getattr(config.rollout, key) != unset:
            raise ValueError(
                f"rollout.{key}: is for synchronous training; with runtime.max_staleness > 0 responses go on while the "
                "trainer trains, and no step waits for the longest one: leave one of the two out"
            )
    slots = plan_slots({name: model.config for name, model in models.items()}, config.runtime.colocation)
    for source, target in syncs:
        if models[target].role is not Rollout:
            continue
        if slots[source] is slots[target]:
            raise ValueError(
                f"runtime.max_staleness: models.{source} and models.{target} take turns (runtime.colocation)"
                ", so neither computes while the other does; give each its own, or set it to 0"
            )
        if not hasattr(models[target].module, "roll"):
            raise ValueError(
                f"runtime.max_staleness: models.{target}.module `{models[target].config.module}` has no method `roll`, "
                "so it cannot generate while its trainer trains; derive it from RolloutModule, or set it to 0"
            )
        if models[target].config.pipeline_parallel > 1:
            raise ValueError(
                f"runtime.max_staleness: models.{target}.pipeline_parallel is {models[target].config.pipeline_parallel}"
                ", and a pipeline takes no weights while it computes; set it to 1, or max_staleness to 0"
            )
