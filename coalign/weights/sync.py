"""After a training step: give the source's weights to the models that compute with them.

This file picks a transport by where the models live; each transport has a file of its own.
"""

from __future__ import annotations

import time

from coalign.types import Stats, Total
from coalign.weights.in_process import adopt, copy
from coalign.weights.object_store import through_store
from coalign.weights.transport import Model, Transport


class WeightSync:
    """Weights of ``source`` to ``target``, with a version that the target reports for every token it samples.

    ``overlap``: the target computes while the source trains, so it needs weights that stand still.
    """

    def __init__(
        self, source: Model, target: Model, *, overlap: bool = False, transport: Transport | None = None
    ) -> None:
        self.source = source
        self.target = target
        self.transport = transport or transport_between(source, target, overlap)
        self.complete = False  # the target has all weights: from then on frozen ones need not move

    def __call__(self, version: int) -> Stats:
        """Move the weights and wait until every replica serves them.

        `sync/bytes` (moved to each target) and `sync/seconds`. Raises WorkerError naming the tensor that arrived
        damaged; the target then still serves its old version.
        """
        begun = time.perf_counter()
        moved = self.transport(self.source, self.target, version, self.complete)
        self.complete = True
        return {"sync/bytes": Total(moved), "sync/seconds": Total(time.perf_counter() - begun)}


def transport_between(source: Model, target: Model, overlap: bool) -> Transport:
    """The live tensors, or a copy, where both models are in one process; the object store otherwise."""
    if source.store.in_process and target.store.in_process:
        return copy if overlap else adopt
    return through_store
