"""Cuts the updates of a training step into leaves: micro-batches that do not depend on the number of ranks.

A trainer with `reduction: exact` computes them as they are cut here, and adds their gradients in the order of their
numbers (coalign.backends.hf.exact). Leaf n of an update goes to rank n modulo the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalign.cluster.future import BatchRef, Store, WorkerRows
from coalign.data.batch import Batch, pack_rows, split_ranges


@dataclass(frozen=True, slots=True)
class LeafRows(WorkerRows):
    """The rows that a worker gets, and the leaf of its update to which each belongs: i32[N], a column of the batch."""

    leaf: np.ndarray | None = None

    def gather(self, store: Store) -> Batch:
        batch = WorkerRows.gather(self, store)
        return batch if self.leaf is None else batch.with_(leaf=torch.tensor(self.leaf))


@dataclass(frozen=True, slots=True)
class Leaves:
    """For each row of a batch, the ``update`` that uses it and its ``number`` among the leaves of that update: i32[N]
    both."""

    update: Tensor
    number: Tensor

    def split(self, parts: int) -> tuple[Tensor, ...]:
        """The rows i64 of each rank, in the order of the batch."""
        return tuple((self.number % parts == part).nonzero().flatten() for part in range(parts))

    def label(self, shards: Sequence[WorkerRows], rows: Sequence[Tensor]) -> list[WorkerRows]:
        """The shards of a batch, with the ``rows`` of each, as workers get them."""
        return [
            LeafRows(s.payloads, s.which, s.rows, self.update[own].numpy(), self.number[own].numpy())
            for s, own in zip(shards, rows, strict=True)
        ]


def cut_leaves(batch: BatchRef, updates: int, max_tokens: int | None, *, whole: bool) -> Leaves:
    """Cut ``batch`` into updates (as Batch.split does) and these into leaves (as Batch.micro does). Raises what that
    raises; ``whole``: no group is cut."""
    update, number = (torch.zeros(len(batch), dtype=torch.int32) for _ in range(2))
    for i, (start, stop) in enumerate(split_ranges(batch.lengths, updates, keep=batch.group)):
        keep = None if batch.group is None else batch.group[start:stop]
        update[start:stop] = i
        for leaf, rows in enumerate(pack_rows(batch.lengths[start:stop], max_tokens, keep=keep, whole=whole)):
            number[start + torch.tensor(rows)] = leaf
    return Leaves(update, number)
