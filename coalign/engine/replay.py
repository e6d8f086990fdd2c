"""Trains on samples of earlier steps again: the batches of the last steps are kept, and a function mixes them.

Replayed samples may be older than the bound on staleness. The trainer computes their log-probs anew, so the importance
weights of the loss account for their age.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import BatchRef, Future
from coalign.data.batch import Batch

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster


class Replay:
    """Keeps the newest batch and the ``steps`` before it; ``function`` mixes them into one batch."""

    def __init__(self, cluster: Cluster, function: partial[Any], steps: int) -> None:
        self.cluster = cluster
        self.function = function
        self.remembered: deque[BatchRef] = deque(maxlen=steps + 1)

    def mix(self, batch: BatchRef) -> Future:
        """Add the newest batch, and return the batch to train on."""
        self.remembered.append(batch)
        return self.cluster.transform(self.function.func, *self.remembered, **self.function.keywords)

    def restore(self, batches: list[Batch]) -> None:
        """Remember these batches alone, oldest first."""
        self.remembered.clear()
        self.remembered.extend(self.cluster.put(batch) for batch in batches)
