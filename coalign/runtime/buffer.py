"""Batches on their way from the environment to the trainer, oldest first, within the bound on staleness.

A batch that is consumed at step s was asked for when the weights had version v >= s - max_staleness: a batch is only
begun while ``begun - version <= max_staleness``, and step s consumes the s-th batch begun. So the bound holds by
construction and is asserted where it matters, at consumption. With max_staleness 0 a batch is begun only after the
weights of the step before are in place: synchronous training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BufferedBatch(Generic[T]):
    step: int  # the training step that will consume it
    version: int  # the weight version it was begun with
    batch: T


class Buffer(Generic[T]):
    """A first-in first-out queue up to step ``last`` of a run."""

    def __init__(self, max_staleness: int, last: int) -> None:
        self.max_staleness = max_staleness
        self.last = last
        self.begun = 0
        self._entries: deque[BufferedBatch[T]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, version: int, begin: Callable[[int], T]) -> None:
        """Begin as many batches as the bound allows at this version; ``begin(step)`` starts the one for that step."""
        while self.begun < self.last and self.begun - version <= self.max_staleness:
            self._entries.append(BufferedBatch(self.begun, version, begin(self.begun)))
            self.begun += 1

    def take(self, version: int) -> T:
        """The oldest batch. AssertionError if it were staler than the bound: a bug in the loop, never a setting."""
        entry = self._entries.popleft()
        assert version - entry.version <= self.max_staleness and entry.step == version, entry
        return entry.batch

    def entries(self) -> list[BufferedBatch[T]]:
        """What is inside, oldest first (for a checkpoint)."""
        return list(self._entries)

    def restore(self, step: int, entries: list[BufferedBatch[T]]) -> None:
        """Go on at ``step`` with what ``entries`` gave."""
        self._entries = deque(entries)
        self.begun = step + len(entries)
