"""Groups of samples that are complete and wait for a step: first in, first out, and none older than the bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef


@dataclass(frozen=True, slots=True)
class ReadyGroups:
    """Neighbouring groups whose oldest token was sampled by the weights of ``version``."""

    batch: BatchRef
    version: int

    @property
    def ends(self) -> list[int]:
        """The row at which each group ends; without groups every row is one."""
        return _find_group_ends(self.batch.group, len(self.batch))


class GroupPool:
    """A first-in first-out queue of references to groups no older than ``max_age`` weight versions."""

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._ready: deque[ReadyGroups] = deque()

    def __len__(self) -> int:
        """Count the groups."""
        return count_groups(self._ready)

    def add(self, batch: BatchRef, versions: Tensor | int) -> None:
        """Add groups; ``versions`` i64[groups], or one for all, are those of their oldest tokens."""
        ends = _find_group_ends(batch.group, len(batch))
        ages = torch.as_tensor(versions).expand(len(ends)).tolist()
        start = 0
        for i, end in enumerate(ends):
            if i + 1 == len(ends) or ages[i + 1] != ages[i]:
                self._ready.append(ReadyGroups(batch.slice(start, end), ages[i]))
                start = end

    def expire(self, version: int) -> list[ReadyGroups]:
        """Drop the groups that are too old to be trained on at this version, and return them."""
        old = [ready for ready in self._ready if version - ready.version > self.max_age]
        self._ready = deque(ready for ready in self._ready if version - ready.version <= self.max_age)
        return old

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


def count_groups(entries: Iterable[ReadyGroups]) -> int:
    return sum(len(ready.ends) for ready in entries)


def _find_group_ends(group: Tensor | None, rows: int) -> list[int]:
    """Return where each run of equal neighbours in ``group`` i64[N] ends; without groups every row is one."""
    if group is None:
        return list(range(1, rows + 1))
    return torch.unique_consecutive(group, return_counts=True)[1].cumsum(0).tolist()


def list_groups(group: Tensor | None) -> list[int]:
    """Return the group numbers of neighbouring rows, each once; none without that column."""
    return [] if group is None else torch.unique_consecutive(group).tolist()
