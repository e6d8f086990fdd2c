"""Rows that are there before the rest: of a call that independent replicas answer one by one, the next model takes what
has come.

How the rows are bundled depends on the numbers of replicas alone, so what is computed together does not depend on who
was first: only the order in time does.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from itertools import pairwise

from coalign.cluster.answers import Running
from coalign.cluster.future import BatchRef, Future, Store

BUNDLES = 8  # at most
CALLS = 256  # at most, but for two bundles: each is a call on every replica that takes the rows


def arriving(call: Future, store: Store, takers: int) -> Iterator[dict[int, BatchRef]]:
    """The rows of the call's result, as they come, for so many replicas (``takers``): bundles by their position, all
    that are there at a time. Raises what the call raises."""
    missing = dict(enumerate(_bundles(call.answers.result(), takers)))
    while missing:
        there = {at: answers for at, answers in missing.items() if all(each.meta.done() for each in answers)}
        waiting = [each.meta for answers in missing.values() for each in answers if not each.meta.done()]
        if call.done():
            call.result()
        if there and all(_good(each) for answers in there.values() for each in answers):
            yield {at: _rows(answers, store) for at, answers in there.items()}
            missing = {at: answers for at, answers in missing.items() if at not in there}
        elif there:  # an error, which the call raises
            call.result()
        else:
            concurrent.futures.wait([call.ended, *waiting], return_when=concurrent.futures.FIRST_COMPLETED)


def streams(call: Future) -> bool:
    """Whether the rows of this call's result come in parts. Waits until it is under way."""
    return len(call.answers.result()) > 1


def _bundles(answers: Sequence[Running], takers: int) -> list[Sequence[Running]]:
    """Neighbours, in groups of nearly equal numbers."""
    count = min(len(answers), BUNDLES, max(2, CALLS // takers))
    return [answers[a:b] for a, b in pairwise(len(answers) * i // count for i in range(count + 1))]


def _good(answer: Running) -> bool:
    return answer.meta.exception() is None and answer.meta.result().failure is None


def _rows(answers: Sequence[Running], store: Store) -> BatchRef:
    return BatchRef.concat([BatchRef.of(each.meta.result(), each.payload, store) for each in answers])
