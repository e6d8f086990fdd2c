"""Waits for the tasks of workers, and merges their answers into one outcome.

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
from typing import Any, Protocol, cast

import torch

from coalign.cluster.future import BatchRef, Call, Future, Meta, Outcome, Span, Store, WorkerError, WorkerFailure
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
