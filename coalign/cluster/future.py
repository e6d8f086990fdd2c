"""What a call on a model gives back: a Future at once, and later a reference to a batch, statistics or a value.

Payloads never lie here: a BatchRef knows where the rows are, how long they are and how they group, which is all that a
driver needs to cut them up and hand them on.

Threads that never keep the process from ending, even when a task hangs.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coalign.cluster.functions import check_same_sequences, merge_columns
from coalign.data.batch import Batch
from coalign.types import Stats, Status, Total

if TYPE_CHECKING:
    from coalign.cluster.answers import Running


# What a driver knows of each row beside its length, where there is such a column: fields of BatchRef and Meta.
KNOWN = ("group", "work", "status")
MOVE = "move"  # the verb that makes room for a call, or has what it needs come (coalign.cluster.residency)


class Store(Protocol):
    """Where payloads lie: this process's memory, or Ray's object store. References are opaque, freed when dropped."""

    in_process: bool  # True: what is put is handed on as the same live object, nothing copied

    def put(self, value: Any) -> Any:
        """Keep a batch or any other value; its reference."""
        ...

    def get(self, ref: Any) -> Any:
        """The value behind a reference made by ``put``."""
        ...

    def rows(self, ref: Any, rows: np.ndarray) -> Batch:
        """Some sequences of a stored batch, in this order (i64)."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """Rows on their way to a worker: the stored batches, and for each row which of them it is in (i64[N]), and where
    there (i64[N]); ``update`` i32[N] becomes a column, if there is one."""

    payloads: tuple[Any, ...]
    which: np.ndarray
    rows: np.ndarray
    update: np.ndarray | None = None

    def gather(self, store: Store) -> Batch:
        """The rows, in their order."""
        by_payload = np.argsort(self.which, kind="stable")
        cuts = np.searchsorted(self.which[by_payload], np.arange(1, len(self.payloads)))
        rows = np.split(self.rows[by_payload], cuts)
        pairs = zip(self.payloads, rows, strict=True)
        batch = Batch.concat(
            [p.gather(store, some) if isinstance(p, PayloadJoin) else store.rows(p, some) for p, some in pairs]
        )
        batch = batch.select(torch.from_numpy(np.argsort(by_payload))) if len(self.payloads) > 1 else batch
        return batch if self.update is None else batch.with_(update=torch.tensor(self.update))


@dataclass(frozen=True, slots=True)
class PayloadJoin:
    """A payload that nobody has stored: its columns lie in several shares, each of the same sequences. Of one name, the
    later column counts."""

    shares: tuple[WorkerRows, ...]

    def gather(self, store: Store, rows: np.ndarray) -> Batch:
        """Some sequences, in this order (i64)."""
        parts = []
        for share in self.shares:
            used, which = np.unique(share.which[rows], return_inverse=True)  # others may lie on another node
            payloads = tuple(share.payloads[number] for number in used) or share.payloads[:1]
            parts.append(WorkerRows(payloads, which, share.rows[rows]).gather(store))
        return merge_columns(parts)


@dataclass(frozen=True)
class BatchRef:
    """A batch that lies elsewhere: row i is row ``rows[i]`` of ``payloads[which[i]]`` (i64[N] both).

    lengths i64[N], group i64[N] and status u8[N] (None without that column), and ``work`` i64[N]: what it will take to
    generate each row, in comparison (None: the same for all).
    """

    payloads: tuple[Any, ...] = field(repr=False)
    which: Tensor = field(repr=False)
    rows: Tensor = field(repr=False)
    lengths: Tensor = field(repr=False)
    group: Tensor | None = field(repr=False)
    columns: tuple[str, ...]
    store: Store = field(repr=False)
    work: Tensor | None = field(default=None, repr=False)
    status: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens_total(self) -> int:
        return int(self.lengths.sum())

    @staticmethod
    def of(meta: Meta, payload: Any, store: Store) -> BatchRef:
        """A whole stored batch, from its description."""
        assert meta.lengths is not None, "the description of a batch has its lengths"
        rows, lengths = torch.arange(len(meta.lengths)), meta.lengths
        which = torch.zeros_like(rows)
        return BatchRef((payload,), which, rows, lengths, meta.group, meta.columns, store, meta.work, meta.status)

    @property
    def share(self) -> WorkerRows:
        return WorkerRows(self.payloads, self.which.numpy(), self.rows.numpy())

    def slice(self, start: int, stop: int) -> BatchRef:
        """Sequences start..stop-1, nothing moved."""
        return self.select(slice(start, stop))

    def select(self, rows: Tensor | slice) -> BatchRef:
        """The sequences ``rows`` (i64, in any order), nothing moved. None of them is still a batch with its columns."""
        used, which = torch.unique(self.which[rows], return_inverse=True)
        payloads = tuple(self.payloads[number] for number in used.tolist()) or self.payloads[:1]
        known = {name: None if (own := getattr(self, name)) is None else own[rows] for name in KNOWN}
        return replace(self, payloads=payloads, which=which, rows=self.rows[rows], lengths=self.lengths[rows], **known)

    def fetch(self, rows: int | None = None) -> Batch:
        """Bring the first ``rows`` sequences (None: all) into this process."""
        wanted = self if rows is None else self.slice(0, min(rows, len(self)))
        return wanted.share.gather(self.store)

    @staticmethod
    def concat(refs: list[BatchRef]) -> BatchRef:
        """One after the other; empty ones, which may lack columns, leave no trace unless all are empty."""
        refs = [ref for ref in refs if len(ref)] or refs[:1]
        number = {id(payload): payload for ref in refs for payload in ref.payloads}
        at = {key: index for index, key in enumerate(number)}
        known = {name: [getattr(ref, name) for ref in refs] for name in KNOWN}
        return BatchRef(
            tuple(number.values()),
            torch.cat([torch.tensor([at[id(payload)] for payload in ref.payloads])[ref.which] for ref in refs]),
            torch.cat([ref.rows for ref in refs]),
            torch.cat([ref.lengths for ref in refs]),
            columns=refs[0].columns,
            store=refs[0].store,
            **{name: None if any(own is None for own in each) else torch.cat(each) for name, each in known.items()},
        )

    @staticmethod
    def join(refs: list[BatchRef]) -> BatchRef:
        """The columns of all, of one name the later; nothing moved. ValueError if the sequences are not the same."""
        base = refs[0]
        for position, other in enumerate(refs[1:], start=2):
            check_same_sequences(base, other, position)
        if len(refs) == 1:
            return base
        payload = PayloadJoin(tuple(ref.share for ref in refs))
        known = {name: own for name in KNOWN for ref in refs if (own := getattr(ref, name)) is not None}
        columns = tuple(dict.fromkeys(name for ref in refs for name in ref.columns))
        return BatchRef.of(Meta(base.lengths, columns=columns, **known), payload, base.store)

    def without_errors(self) -> tuple[BatchRef, Stats]:
        """The rows whose status is not ERROR, nothing moved, and how many the others were (`samples/dropped`)."""
        if self.status is None:
            return self, {}
        good = self.status != Status.ERROR
        return self if bool(good.all()) else self.select(good), {"samples/dropped": Total(float((~good).sum()))}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """An exception that crossed a process boundary: always printable, whole if it could be pickled."""

    kind: str
    message: str
    traceback: str
    exception: BaseException | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """What the models of a process have on its device: bytes by model and part of what is there (``held``), and what
    each other part would bring (``away``; of models that move by means of their own, nothing). ``before`` a call, and
    at its ``peak``: bytes of all of them."""

    held: Mapping[str, Mapping[str, int]]
    away: Mapping[str, Mapping[str, int]]
    before: int
    peak: int


@dataclass(frozen=True, slots=True)
class Meta:
    """What a driver learns of one worker's result; small, whatever the size of the payload.

    lengths i64[N], group i64[N], work i64[N], status u8[N] and columns describe the stored batch (None / empty without
    one);
    ``stats`` is None unless the call gave some; ``value`` is a plain result; ``verb``, ``start`` (seconds since the
    epoch, by the worker's clock) and ``seconds`` say what was done, and when; ``memory`` is the process's peak in bytes
    (the device's, if the module computes on one).
    """

    lengths: Tensor | None = None
    group: Tensor | None = None
    work: Tensor | None = None
    status: Tensor | None = None
    columns: tuple[str, ...] = ()
    stats: Stats | None = None
    value: Any = None
    verb: str = ""
    start: float = 0.0
    seconds: float = 0.0
    memory: int = 0
    use: DeviceMemoryUse | None = None  # where somebody looks after the device's memory (coalign.cluster.residency)
    failure: WorkerFailure | None = None

    @staticmethod
    def of(batch: Batch, stats: Stats | None = None) -> Meta:
        """The description of a batch that is about to be stored."""
        given = [batch[name].long() for name in ("expected_tokens", "samples") if name in batch]
        work = torch.stack(given).prod(0) if given else None
        columns = (*batch.token, *batch.sequence)
        return Meta(batch.lengths, batch.get("group"), work, batch.get("status"), columns, stats)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a flow: a ``method`` of a ``model``, or a function (``model`` is None). As text `policy.generate`."""

    model: str | None
    method: str

    def __str__(self) -> str:
        return f"{self.model}.{self.method}" if self.model else self.method


class WorkerError(RuntimeError):
    """A call failed in a worker. Says which call, model, replica and rank, with the traceback from there.

    ``cause`` is the worker's own exception where it could travel (None if the process died or timed out).
    """

    def __init__(self, call: Call, where: str, failure: WorkerFailure) -> None:
        text = f"{call} failed in {where}: {failure.kind}: {failure.message}"
        super().__init__(f"{text}\n\n{failure.traceback}" if failure.traceback else text)
        self.call, self.where, self.failure = call, where, failure

    @property
    def cause(self) -> BaseException | None:
        return self.failure.exception


@dataclass(frozen=True, slots=True)
class Span:
    """What one worker did for a call: a ``verb`` of coalign.cluster.worker, from ``start`` (seconds since the epoch)
    for ``seconds``; ``where`` as in errors."""

    where: str
    verb: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished call: its result and the peak of its largest worker in bytes. Row i of the result is row ``order[i]``
    of what the workers gave, one after the other (None: as they gave it)."""

    result: Any
    stats: Stats
    memory: int = 0
    order: Tensor | None = None


class Future:
    """A ``call`` under way.

    ``result()`` waits: a BatchRef, merged Stats or a plain value; WorkerError (or the first error of the run, if that
    ended this call) otherwise. After it ``stats``, ``seconds`` (the slowest worker's) and ``peak_memory`` (bytes, of
    the largest worker) are there; before, they wait too.

    ``made`` is when the call was made (seconds since the epoch), ``running`` what workers are doing for it now, and
    ``spans`` what they have done. ``answers`` comes once the call is under way: what each independent replica does for
    it, when it has done it (empty if the rows are of no use before all are there).
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.made = time.time()
        self.running: list[Running] = []
        self.spans: list[Span] = []
        self.answers: concurrent.futures.Future[list[concurrent.futures.Future[Running]]] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

    def result(self) -> Any:
        return self.ended.result().result

    def done(self) -> bool:
        return self.ended.done()

    @property
    def stats(self) -> Stats:
        return self.ended.result().stats

    @property
    def seconds(self) -> float:
        self.result()
        own: dict[str, float] = {}
        for span in self.spans:
            if span.verb != MOVE:
                own[span.where] = own.get(span.where, 0.0) + span.seconds
        return max(own.values(), default=0.0)

    @property
    def peak_memory(self) -> int:
        return self.ended.result().memory

    def comes_in(self, answers: list[concurrent.futures.Future[Running]]) -> None:
        """The call is under way: set ``answers``. Only the first time counts."""
        if not self.answers.done():
            self.answers.set_result(answers)

    def succeed(self, outcome: Outcome) -> None:
        """Set the outcome, unless an error of the run came first."""
        self._settle(lambda: self.ended.set_result(outcome))

    def fail(self, error: BaseException) -> None:
        """End with ``error``, unless the call has ended already."""
        self._settle(lambda: self.ended.set_exception(error))

    def _settle(self, settle: Any) -> None:
        try:
            settle()
        except concurrent.futures.InvalidStateError:
            return  # two threads may end a call: its own queue, and the one that saw the run's first error
        self.running = []
        self.comes_in([])


Task = Callable[[], None]  # must not raise: whoever submits it handles its errors


def start_thread(task: Task) -> None:
    """Run ``task`` beside everything else."""
    threading.Thread(target=task, name="coalign-task", daemon=True).start()


class CallQueue:
    """One thread that runs its tasks in the order given."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"coalign-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Run ``task`` after all earlier ones."""
        self._tasks.put(task)

    def close(self) -> None:
        """End once the tasks given so far are done."""
        self._tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, or this long.

        A thread that is still freeing tensors while the interpreter goes away aborts the process.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
