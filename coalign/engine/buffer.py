"""Queues between roll-out and training: ``Buffer`` holds rounds under way, ``GroupPool`` complete groups. Oldest first.

A batch that is consumed at step s was begun at weight version v >= s - max_staleness: a batch is only begun while
``begun - version <= max_staleness``, and step s consumes the s-th batch begun. So the bound holds by construction and
is asserted where it matters, at consumption. With max_staleness 0 a batch is begun only after the weights of the step
before are in place: synchronous training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from coalign.cluster.future import BatchRef

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
        """Begin as many batches as the bound allows at this version; ``begin(step)`` begins the one for that step."""
        while self.begun < self.last and self.begun - version <= self.max_staleness:
            self._entries.append(BufferedBatch(self.begun, version, begin(self.begun)))
            self.begun += 1

    def take(self, version: int) -> T:
        """Remove and return the oldest batch. AssertionError if it is staler than the bound: a bug in the loop."""
        entry = self._entries.popleft()
        assert version - entry.version <= self.max_staleness and entry.step == version, entry
        return entry.batch

    def entries(self) -> list[BufferedBatch[T]]:
        """Return all entries, oldest first (for a checkpoint)."""
        return list(self._entries)

    def restore(self, step: int, entries: list[BufferedBatch[T]]) -> None:
        """Continue at ``step`` with the result of ``entries``."""
        self._entries = deque(entries)
        self.begun = step + len(entries)


@dataclass(frozen=True, slots=True)
class ReadyGroups:
    """Neighbouring groups whose oldest token was chosen by the weights of ``version``."""

    batch: BatchRef
    version: int

    @property
    def ends(self) -> list[int]:
        """Where each group ends, in rows; without groups every row is one."""
        return find_group_ends(self.batch.group, len(self.batch))


class GroupPool:
    """A first-in first-out queue of groups no older than ``max_age`` weight versions.

    Batches stay where they are stored.
    """

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._ready: deque[ReadyGroups] = deque()

    def __len__(self) -> int:
        """Groups inside."""
        return sum(len(ready.ends) for ready in self._ready)

    def add(self, batch: BatchRef, versions: Tensor | int) -> None:
        """Add groups; ``versions`` i64[groups], or one for all, are those of their oldest tokens."""
        ends = find_group_ends(batch.group, len(batch))
        ages = torch.as_tensor(versions).expand(len(ends)).tolist()
        start = 0
        for i, end in enumerate(ends):
            if i + 1 == len(ends) or ages[i + 1] != ages[i]:
                self._ready.append(ReadyGroups(batch.slice(start, end), ages[i]))
                start = end

    def expire(self, version: int) -> int:
        """Drop the groups that are too old to be trained on at this version; return how many."""
        before = len(self)
        self._ready = deque(ready for ready in self._ready if version - ready.version <= self.max_age)
        return before - len(self)

    def take(self, groups: int | None, version: int) -> BatchRef:
        """Remove and return the oldest ``groups`` (None: all), or fewer if there are not so many.

        RuntimeError if the pool is empty. AssertionError if a group is older than the bound, which is a bug.
        """
        taken: list[BatchRef] = []
        missing = len(self) if groups is None else groups
        while self._ready and missing > 0:
            ready = self._ready.popleft()
            assert version - ready.version <= self.max_age, (version, ready)
            ends = ready.ends
            cut = ends[min(missing, len(ends)) - 1]
            taken.append(ready.batch.slice(0, cut))
            missing -= len(ends)
            if cut < len(ready.batch):
                self._ready.appendleft(ReadyGroups(ready.batch.slice(cut, len(ready.batch)), ready.version))
        if not taken:
            raise RuntimeError("there is no group to train on")
        return BatchRef.concat(taken)

    def entries(self) -> list[ReadyGroups]:
        """Return all entries, oldest first (for a checkpoint)."""
        return list(self._ready)

    def restore(self, entries: list[ReadyGroups]) -> None:
        """Replace the content by the result of ``entries``."""
        self._ready = deque(entries)


def find_group_ends(group: Tensor | None, rows: int) -> list[int]:
    """Return where each run of equal neighbours in ``group`` i64[N] ends; without groups every row is one."""
    if group is None:
        return list(range(1, rows + 1))
    return torch.unique_consecutive(group, return_counts=True)[1].cumsum(0).tolist()
