"""Rows that are there before the rest: of a call that independent replicas answer one by one, the next model takes what
has come.

How the rows are bundled depends on the numbers of replicas alone, so what is computed together does not depend on who
was first: only the order in time does.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from coalign.cluster.answers import Running
from coalign.cluster.future import BatchRef, Future, Store

Answer = concurrent.futures.Future[Running]

BUNDLES = 8  # at most
CALLS = 256  # at most, but for two bundles: each is a call on every replica that takes the rows


def answered(running: Running) -> Answer:
    """A verb under way, once its worker has answered."""
    answer: Answer = concurrent.futures.Future()
    running.meta.add_done_callback(lambda _: answer.set_result(running))
    return answer


def streams(call: Future) -> bool:
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
            concurrent.futures.wait([call.ended, *waiting], return_when=concurrent.futures.FIRST_COMPLETED)
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
