"""The training side of an engine: one ``train_flow``, then the new weights go to whoever generates with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from coalign.cluster.future import BatchRef
from coalign.runtime.calls import watch
from coalign.types import Stats, Total, merge_stats
from coalign.weights.sync import WeightSync


class Trainer:
    """Runs ``flow(batch)`` (an engine's ``train_flow``) and the weight syncs that follow it.

    ``main`` is the model whose metrics need no prefix.
    """

    def __init__(
        self, cluster: Any, flow: Callable[[BatchRef], Any], syncs: Sequence[WeightSync], main: str | None
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.main = main
        self.syncs = list(syncs)

    def step(self, batch: BatchRef) -> Stats:
        """Train on one batch; waits until every model has taken its step."""
        begun = time.perf_counter()
        with watch(self.cluster) as calls:
            self.flow(batch)
        return merge_stats([calls.stats(self.main), {"time/train": Total(time.perf_counter() - begun)}])

    def sync(self, version: int) -> Stats:
        """Give the weights of ``version`` to every target; a target serves them only once they are verified.

        Also what moved onto devices and off them since the last sync (`swaps/…`, `memory/device`).
        """
        begun = time.perf_counter()
        parts = [sync(version) for sync in self.syncs]
        swaps = self.cluster.residency.take()
        return merge_stats([*parts, swaps, {"time/sync": Total(time.perf_counter() - begun)}])
