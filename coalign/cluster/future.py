"""A call and its Future, the workers' tasks and how their answers are awaited and merged."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef, Meta, Store, WorkerFailure
from coalign.types import Max, Stats, Total, merge_stats

MOVE = "move"  # the worker's verb that moves components of a model between host and device (coalign.cluster.residency)
LOAD_SECONDS = 3600.0  # a model may take this long to load, whatever runtime.call_timeout says
LEAST_SECONDS = 3600.0  # without runtime.call_timeout: every call may take this long
WAIT_SECONDS = 1.0  # between two calls of `on_wait` while a result is waited for
LOSS_SECONDS = 3.0  # a loss is reported within this time after neighbours in a collective have failed
NETWORK_ERRORS = ("DistNetworkError", "DistStoreError", "DistBackendError")  # torch.distributed's; NCCL's is the last
GLOO = "gloo/transport"  # in the errors of gloo's connections, which have no class of their own
LONGEST_TIMES = 10.0  # and this many times the longest call of the same model and method so far


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a flow: a ``method`` of a ``model``, or a function (``model`` is None). As text `policy.generate`."""

    model: str | None
    method: str

    def __str__(self) -> str:
        return f"{self.model}.{self.method}" if self.model else self.method


class WorkerError(RuntimeError):
    """A call failed in a worker. The message names the call, model, replica and rank, and has the worker's traceback.

    ``cause`` is the worker's own exception, None if it could not be pickled or if the process died or timed out.
    """

    def __init__(self, call: Call, worker: str, failure: WorkerFailure) -> None:
        text = f"{call} failed in {worker}: {failure.error_type}: {failure.message}"
        super().__init__(f"{text}\n\n{failure.traceback}" if failure.traceback else text)
        self.call, self.worker, self.failure = call, worker, failure

    @property
    def cause(self) -> BaseException | None:
        return self.failure.exception


class WorkerLost(WorkerError):
    """Processes died, or did not answer in time: the error does not come from the work itself.

    ``workers`` names them.
    """

    def __init__(self, call: Call, workers: Sequence[str], failure: WorkerFailure) -> None:
        super().__init__(call, ", ".join(workers), failure)
        self.workers = tuple(workers)


class PayloadLost(WorkerLost):
    """A stored batch was lost with its node."""

    def __init__(self, text: str) -> None:
        super().__init__(Call(None, "fetch"), [], WorkerFailure("payload lost", text, ""))
        self.text = text

    def __reduce__(self) -> tuple[type[PayloadLost], tuple[str]]:
        return PayloadLost, (self.text,)


@dataclass(frozen=True, slots=True)
class Span:
    """One worker's work for a call: a ``verb`` of coalign.cluster.worker, from ``start`` (seconds since the epoch) for
    ``seconds``. ``worker`` is its name in errors."""

    worker: str
    verb: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished call: its result, its metrics and the memory peak of its largest worker in bytes.

    Row i of the result is row ``order[i]`` of the workers' concatenated results (None: the same order).
    """

    result: Any
    stats: Stats
    memory: int = 0
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A verb that runs in one worker: the future of its Meta, and the reference under which its payload is stored.

    The future raises only if the worker itself is lost. ``submitted_at`` is in seconds since the epoch,
    ``monotonic_start`` the same moment by the monotonic clock.
    """

    worker: str
    meta: concurrent.futures.Future[Meta]
    payload: Any
    submitted_at: float = field(default_factory=time.time)
    monotonic_start: float = field(default_factory=time.monotonic)


TaskFuture = concurrent.futures.Future[WorkerTask]  # a task, once it is done


class WorkerHandle(Protocol):
    """A handle to one worker, in whichever process. ``name`` is what errors call it."""

    name: str

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        """Start a verb of coalign.cluster.worker.Worker there."""
        ...

    def replace(self) -> WorkerHandle:
        """End the process, whatever it is doing, and start an empty one in its place. RuntimeError for a thread."""
        ...


class Future:
    """A ``call`` that runs.

    ``result()`` waits and returns a BatchRef, merged Stats or a plain value. It raises WorkerError if the call failed,
    or the first error of the run. ``stats``, ``seconds`` (the slowest worker's) and ``peak_memory`` (bytes, of the
    largest worker) wait, too.

    ``created_at`` is in seconds since the epoch, ``monotonic_start`` the same moment by the monotonic clock.
    ``running`` are the tasks of workers for it now, ``spans`` their past work. ``partial_results`` is set once the
    tasks have started: a future for each independent chunk of the result (empty if rows are useless alone).
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.created_at, self.monotonic_start = time.time(), time.monotonic()
        self.running: list[WorkerTask] = []
        self.spans: list[Span] = []
        self.partial_results: concurrent.futures.Future[list[TaskFuture]] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

    def result(self) -> Any:
        return self.ended.result().result

    def wait(self, on_wait: Callable[[], None]) -> None:
        """Wait for the end, whatever it is, and call ``on_wait`` every second meanwhile."""
        while not concurrent.futures.wait([self.ended], WAIT_SECONDS).done:
            on_wait()

    def done(self) -> bool:
        return self.ended.done()

    @property
    def stats(self) -> Stats:
        return self.ended.result().stats

    @property
    def seconds(self) -> float:
        self.result()
        seconds_of: dict[str, float] = {}
        for span in self.spans:
            if span.verb != MOVE:
                seconds_of[span.worker] = seconds_of.get(span.worker, 0.0) + span.seconds
        return max(seconds_of.values(), default=0.0)

    @property
    def peak_memory(self) -> int:
        return self.ended.result().memory

    def set_partial_results(self, chunks: list[TaskFuture]) -> None:
        """Set ``partial_results``: the tasks have started. Only the first call counts."""
        if not self.partial_results.done():
            self.partial_results.set_result(chunks)

    def succeed(self, outcome: Outcome) -> None:
        """Set the outcome, unless an error of the run came first."""
        self._settle(lambda: self.ended.set_result(outcome))

    def fail(self, error: BaseException) -> bool:
        """End with ``error``, unless the call has ended already; return whether it had not."""
        return self._settle(lambda: self.ended.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> bool:
        try:
            settle()
        except concurrent.futures.InvalidStateError:
            return False  # two threads may end a call: its own queue, and the one that saw the run's first error
        self.running = []
        self.set_partial_results([])
        return True


class WatchedCalls:
    """The Futures of the calls made while watching, in order."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def stats(self, main: str | None = None) -> Stats:
        """Wait for every call; return their metrics, `time/<model.method>` (s) and `memory/<model>` (MiB, peak).

        With ``main``, the metrics of every other model get its name as a prefix (`value/loss/grad_norm`), so that two
        models that learn are not averaged. Metrics of functions get none.
        """
        stats: list[Stats] = []
        for future in self.futures:
            future.result()
            model = future.call.model
            is_main = main is None or model is None or model == main
            stats.append(dict(future.stats) if is_main else {f"{model}/{k}": v for k, v in future.stats.items()})
            stats.append({f"time/{future.call}": Total(future.seconds)})
            if model:
                stats.append({f"memory/{model}": Max(future.peak_memory / 2**20)})
        return merge_stats(stats)


class CallDeadlines:
    """Decides how many seconds workers may take to answer a call, by its model and method.

    ``limit`` is `runtime.call_timeout`. Without one, the deadline grows with the calls: a hang is certain only beyond
    the time that such calls have taken.
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
        seconds = time.monotonic() - min((task.monotonic_start for task in tasks), default=math.inf)
        self._longest[call] = max(self._longest.get(call, 0.0), seconds)

    def build_error(self, future: Future, tasks: Sequence[WorkerTask]) -> WorkerLost:
        """Build the error for workers that have not answered in time."""
        silent = [task.worker for task in tasks if not task.meta.done()]
        source = "" if self.limit else f"; not set: {LEAST_SECONDS:g} s, or {LONGEST_TIMES:g} times its longest call"
        message = f"no answer within {self.find(future.call):g} s (runtime.call_timeout{source})"
        return WorkerLost(future.call, silent, WorkerFailure("TimeoutError", message, ""))


def wait(future: Future, tasks: Sequence[WorkerTask], deadlines: CallDeadlines) -> list[Meta]:
    """Wait for all tasks and return their Metas, in order.

    WorkerError once a task failed; WorkerLost once a worker was lost, or the call's deadline is over. If an error of
    the run ends ``future``, that error.
    """
    future.running = [*tasks]
    worker_of = {task.meta: task.worker for task in tasks}
    try:
        events = [*worker_of, cast(Any, future.ended)] if worker_of else []
        for count, done in enumerate(concurrent.futures.as_completed(events, deadlines.find(future.call)), 1):
            if done is future.ended:
                done.result()  # raises
            if lost := done.exception():
                raise WorkerLost(future.call, [worker_of[done]], WorkerFailure("worker lost", str(lost).strip(), ""))
            if failure := done.result().failure:
                if lost := _find_lost(tasks):  # its neighbours fail because the connection is gone
                    raise WorkerLost(future.call, [task.worker for task in lost], failure)
                if isinstance(failure.exception, PayloadLost):
                    raise WorkerLost(future.call, [], failure)
                if _is_cut_off(failure):
                    raise WorkerLost(future.call, [worker_of[done]], failure)
                raise WorkerError(future.call, worker_of[done], failure) from failure.exception
            if count == len(worker_of):
                break
    except TimeoutError:
        raise deadlines.build_error(future, tasks) from None
    deadlines.record(future.call, tasks)
    metas = [task.meta.result() for task in tasks]
    pairs = zip(tasks, metas, strict=True)
    future.spans += [Span(task.worker, meta.verb, meta.start, meta.seconds) for task, meta in pairs]
    return metas


def _is_cut_off(failure: WorkerFailure) -> bool:
    """Return whether a collective failed because a connection to another process ended or did not come about."""
    return failure.error_type in NETWORK_ERRORS or (failure.error_type == "RuntimeError" and GLOO in failure.message)


def _find_lost(tasks: Sequence[WorkerTask]) -> list[WorkerTask]:
    """Return the tasks whose workers are lost, after a task has failed."""
    metas = [task.meta for task in tasks]
    concurrent.futures.wait(metas, LOSS_SECONDS, concurrent.futures.FIRST_EXCEPTION)
    return [task for task in tasks if task.meta.done() and task.meta.exception() is not None]


def merge_chunks(metas: Sequence[Meta], counts: Sequence[int]) -> list[Meta]:
    """Merge the Metas of results that came in several chunks: ``counts[i]`` neighbouring Metas become one."""
    merged = []
    for start, stop in pairwise(accumulate(counts, initial=0)):
        chunks = metas[start:stop]
        groups = [chunk.group for chunk in chunks if chunk.group is not None]
        lengths = [chunk.lengths for chunk in chunks if chunk.lengths is not None]
        rows = (
            {"lengths": torch.cat(lengths), "group": torch.cat(groups) if groups else None} if stop - start > 1 else {}
        )
        merged.append(replace(chunks[0], **rows))
    return merged


def merge_answers(
    tasks: Sequence[WorkerTask], metas: Sequence[Meta], store: Store, counted: Sequence[int] | None = None
) -> Outcome:
    """Merge the answers to one call: a BatchRef in this order, merged Stats, or the first worker's plain value.

    ``counted``: positions that count (None: all), since ranks that compute the same rows give the same answer.
    """
    answers = [(tasks[i], metas[i]) for i in (range(len(metas)) if counted is None else counted)]
    stats = merge_stats(meta.stats or {} for _, meta in answers)
    first = metas[0]
    if first.lengths is not None:
        result: Any = BatchRef.concat([BatchRef.of(meta, task.payload, store) for task, meta in answers])
    else:
        result = first.value if first.stats is None else stats
    return Outcome(result, stats, max(meta.memory for meta in metas))


def watch_task(task: WorkerTask) -> TaskFuture:
    """A future that gives the task once its worker has answered."""
    future: TaskFuture = concurrent.futures.Future()
    task.meta.add_done_callback(lambda _: future.set_result(task))
    return future
