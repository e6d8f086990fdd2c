"""Waiting for workers, and making one outcome of their answers.

Rows that are there before the rest: of a call that independent replicas answer one by one, the next model takes what
has come.

How the rows are bundled depends on the numbers of replicas alone, so what is computed together does not depend on who
was first: only the order in time does.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, cast

import torch

from coalign.cluster.future import BatchRef, Call, Future, Meta, Outcome, Span, Store, WorkerError, WorkerFailure
from coalign.types import merge_stats


@dataclass(frozen=True, slots=True)
class Running:
    """A verb under way in one worker: its Meta, when it comes, and the reference under which its payload will lie.

    The future raises only if the worker itself is lost. ``since``: when it was given (seconds since the epoch).
    """

    where: str
    meta: concurrent.futures.Future[Meta]
    payload: Any
    since: float = field(default_factory=time.time)


class WorkerHandle(Protocol):
    """A handle to one worker, wherever it is. ``where``: what errors call it."""

    where: str

    def execute(self, verb: str, *arguments: Any) -> Running:
        """Start a verb of coalign.cluster.worker.Worker there."""
        ...

    def in_parts(self, verbs: Sequence[tuple[Any, ...]]) -> list[Running]:
        """Start verbs (with their arguments) there that follow each other with nothing in between."""
        ...


def wait(future: Future, running: Sequence[Running], timeout: float) -> list[Meta]:
    """The Metas of all workers, in order; WorkerError once one failed, was lost, or kept silent for ``timeout`` s."""
    future.running = [*running]
    where = {each.meta: each.where for each in running}
    try:
        for done in concurrent.futures.as_completed(where, timeout):
            _raise_failure(future.call, where[done], done)
    except TimeoutError:
        raise silence(future, running, timeout) from None
    metas = [each.meta.result() for each in running]
    pairs = zip(running, metas, strict=True)
    future.spans += [Span(each.where, meta.verb, meta.start, meta.seconds) for each, meta in pairs]
    return metas


def silence(future: Future, running: Sequence[Running], timeout: float) -> WorkerError:
    """The error of workers that have not answered for ``timeout`` s."""
    late = ", ".join(each.where for each in running if not each.meta.done())
    message = f"no answer within {timeout:g} s (runtime.call_timeout)"
    return WorkerError(future.call, late, WorkerFailure("TimeoutError", message, ""))


def _raise_failure(call: Call, where: str, done: concurrent.futures.Future[Meta]) -> None:
    if lost := done.exception():
        raise WorkerError(call, where, WorkerFailure("worker lost", str(lost).strip(), "")) from None
    if failure := done.result().failure:
        raise WorkerError(call, where, failure) from failure.exception


def by_share(metas: Sequence[Meta], counts: Sequence[int]) -> list[Meta]:
    """The Metas of results that came in so many parts each (``counts``): the rows of each as those of one."""
    cuts = accumulate(counts, initial=0)
    return [_joined(metas[start:stop]) for start, stop in pairwise(cuts)]


def _joined(parts: Sequence[Meta]) -> Meta:
    if len(parts) == 1:
        return parts[0]
    groups = [part.group for part in parts if part.group is not None]
    lengths = [part.lengths for part in parts if part.lengths is not None]
    return replace(parts[0], lengths=torch.cat(lengths), group=torch.cat(groups) if groups else None)


def combine(
    running: Sequence[Running], metas: Sequence[Meta], store: Store, counted: Sequence[int] | None = None
) -> Outcome:
    """Shares of one result as a whole: a BatchRef in this order, merged Stats, or the first worker's plain value.
    ``counted``: which of them, if not all: ranks that were given the same share say the same."""
    parts = [(running[i], metas[i]) for i in (range(len(metas)) if counted is None else counted)]
    stats = merge_stats(meta.stats or {} for _, meta in parts)
    first = metas[0]
    if first.lengths is not None:
        result: Any = BatchRef.concat([BatchRef.of(meta, each.payload, store) for each, meta in parts])
    else:
        result = first.value if first.stats is None else stats
    return Outcome(result, stats, max(meta.memory for meta in metas))


Answer = concurrent.futures.Future[Running]

BUNDLES = 8  # at most
CALLS = 256  # at most, but for two bundles: each is a call on every replica that takes the rows


def when_answered(running: Running) -> Answer:
    """A verb under way, once its worker has answered."""
    answer: Answer = concurrent.futures.Future()
    running.meta.add_done_callback(lambda _: answer.set_result(running))
    return answer


def is_streamed(call: Future) -> bool:
    """Whether the rows of this call's result come in parts. Waits until it is under way."""
    return len(call.answers.result()) > 1


def arriving(call: Future, store: Store, takers: int) -> Iterator[dict[int, BatchRef]]:
    """The rows of the call's result, as they come, for so many replicas (``takers``): bundles by their position, all
    that are there at a time. Raises what the call raises."""
    missing = dict(enumerate(_bundles(call.answers.result(), takers)))
    while missing:
        there = {at: answers for at, answers in missing.items() if all(answer.done() for answer in answers)}
        if not there:
            waiting = [answer for answer in chain(*missing.values()) if not answer.done()]
            concurrent.futures.wait([cast(Any, call.ended), *waiting], return_when=concurrent.futures.FIRST_COMPLETED)
        if call.done() or not all(_good(answer.result()) for answer in chain(*there.values())):
            call.result()  # raises, if anything went wrong
        if there:
            yield {at: _rows([answer.result() for answer in answers], store) for at, answers in there.items()}
            missing = {at: answers for at, answers in missing.items() if at not in there}


def _bundles(answers: Sequence[Answer], takers: int) -> list[Sequence[Answer]]:
    """Neighbours, in groups of nearly equal numbers."""
    count = min(len(answers), BUNDLES, max(2, CALLS // takers))
    return [answers[a:b] for a, b in pairwise(len(answers) * i // count for i in range(count + 1))]


def _good(running: Running) -> bool:
    return running.meta.exception() is None and running.meta.result().failure is None


def _rows(running: Sequence[Running], store: Store) -> BatchRef:
    return BatchRef.concat([BatchRef.of(each.meta.result(), each.payload, store) for each in running])
