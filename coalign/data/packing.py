"""Where the rows of a training batch lie in it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from coalign.data.examples import Example

Rows = list[list[Example]]


def tokens_of(row: Sequence[Example]) -> int:
    """Of the row's sequences together."""
    return sum(len(example.tokens) for example in row)


@dataclass(frozen=True, slots=True)
class Packing:
    """An order of rows for a batch that will be cut, first into ``parts`` of equal tokens (Batch.split), each of these
    into micro-batches of ``max_tokens`` (Batch.micro; None: not cut).

    The parts get equal mixes of lengths, so that besides their tokens also their attention costs are equal; the
    micro-batches are well filled; and neighbours, which attention takes together, are alike.
    """

    parts: int
    max_tokens: int | None = None

    def order(self, rows: Rows) -> Rows:
        """All of ``rows``, each with its sequences side by side."""
        by_length = sorted(rows, key=tokens_of, reverse=True)
        return [row for part in self._shared_out(by_length) for row in self._filled_up(part)]

    def _shared_out(self, rows: Rows) -> list[Rows]:
        """Each row to the part with the fewest tokens so far (Graham, "Bounds on Multiprocessing Timing Anomalies",
        1969)."""
        parts: list[Rows] = [[] for _ in range(self.parts)]
        fewest = [(0, part) for part in range(self.parts)]
        for row in rows:
            held, part = heapq.heappop(fewest)
            parts[part].append(row)
            heapq.heappush(fewest, (held + tokens_of(row), part))
        return parts

    def _filled_up(self, rows: Rows) -> Rows:
        """Each row to the first micro-batch with room for it (first fit decreasing)."""
        if self.max_tokens is None:
            return rows
        micros: list[tuple[int, Rows]] = []
        for row in rows:
            size = tokens_of(row)
            which = next((i for i, (held, _) in enumerate(micros) if held + size <= self.max_tokens), len(micros))
            held, inside = micros.pop(which) if which < len(micros) else (0, [])
            micros.insert(which, (held + size, [*inside, row]))
        return [row for _, inside in micros for row in inside]
