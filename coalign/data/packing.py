"""Where the rows of a training batch lie in it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from coalign.data.examples import Example


def tokens_of(row: Sequence[Example]) -> int:
    """Of the row's sequences together."""
    return sum(len(example.tokens) for example in row)


def lay_out(drawn: Sequence[list[Example]], parts: int) -> list[list[Example]]:
    """The rows in an order whose ``parts`` consecutive parts of equal tokens (Batch.split) also have equal mixes of
    lengths, and so equal attention cost, and in which neighbours, which attention takes together, are alike.

    From long to short, each row goes to the part with the fewest tokens so far (Graham, "Bounds on Multiprocessing
    Timing Anomalies", 1969); a part keeps that order.
    """
    shares: list[list[list[Example]]] = [[] for _ in range(parts)]
    fewest = [(0, part) for part in range(parts)]
    for row in sorted(drawn, key=tokens_of, reverse=True):
        held, part = heapq.heappop(fewest)
        shares[part].append(row)
        heapq.heappush(fewest, (held + tokens_of(row), part))
    return [row for share in shares for row in share]
