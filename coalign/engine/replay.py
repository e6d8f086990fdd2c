"""Samples of earlier steps, trained on again: the batches of the last steps are remembered, a function mixes them.

Replayed samples are older than the bound on staleness allows for fresh ones, by design; the trainer's own log-probs are
computed anew for them (they were sampled by older weights), and the importance weights of the loss see the distance.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import BatchRef, Future

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster


class Replay:
    """The last ``steps`` batches besides the newest, and the function that makes of them what is trained on."""

    def __init__(self, cluster: Cluster, function: partial[Any], steps: int) -> None:
        self.cluster = cluster
        self.function = function
        self.remembered: deque[BatchRef] = deque(maxlen=steps + 1)

    def mix(self, batch: BatchRef) -> Future:
        """What to train on, now that ``batch`` is the newest: a BatchRef."""
        self.remembered.append(batch)
        return self.cluster.transform(self.function.func, *self.remembered, **self.function.keywords)

    def state_dict(self) -> list[Any]:
        """The remembered batches, oldest first."""
        return [batch.fetch() for batch in self.remembered]

    def load_state_dict(self, state: list[Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self.remembered.clear()
        self.remembered.extend(self.cluster.put(batch) for batch in state)
