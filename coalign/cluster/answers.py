"""Waiting for workers, and making one outcome of their answers."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from coalign.cluster.future import BatchRef, Future, Meta, Outcome, Span, Store, WorkerError, WorkerFailure
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

    def in_parts(self, verbs: Sequence[tuple[Any, ...]]) -> list[Running]:
        """Start verbs (with their arguments) there that follow each other with nothing in between."""


def wait(future: Future, running: Sequence[Running], timeout: float) -> list[Meta]:
    """The Metas of all workers, in order; WorkerError once one failed, was lost, or kept silent for ``timeout`` s."""
    future.running = [*running]
    where = {each.meta: each.where for each in running}
    try:
        for done in concurrent.futures.as_completed(where, timeout):
            _raise_failure(future.label, where[done], done)
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
    return WorkerError(future.label, late, WorkerFailure("TimeoutError", message, ""))


def _raise_failure(label: str, where: str, done: concurrent.futures.Future[Meta]) -> None:
    if lost := done.exception():
        raise WorkerError(label, where, WorkerFailure("worker lost", str(lost).strip(), "")) from None
    if failure := done.result().failure:
        raise WorkerError(label, where, failure) from failure.exception


def by_share(metas: Sequence[Meta], counts: Sequence[int]) -> list[Meta]:
    """The Metas of results that came in so many parts each (``counts``): the rows of each as those of one."""
    cuts = accumulate(counts, initial=0)
    return [_joined(metas[start:stop]) for start, stop in pairwise(cuts)]


def _joined(parts: Sequence[Meta]) -> Meta:
    if len(parts) == 1:
        return parts[0]
    group = None if parts[0].group is None else torch.cat([part.group for part in parts])
    return replace(parts[0], lengths=torch.cat([part.lengths for part in parts]), group=group)


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
