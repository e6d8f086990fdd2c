"""Watches the calls that a piece of flow makes, for their statistics and times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coalign.cluster.future import Future
from coalign.types import Max, Metric, Stats, Total, merge_stats


class Calls:
    """The Futures made while watching, in order."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def stats(self, main: str | None = None) -> Stats:
        """Waits for every call; their metrics, with `time/<model.method>` (s) and `memory/<model>` (MiB, peak).

        With ``main``, what any other model reports is named after it (`value/loss/grad_norm`): two models that learn
        must not be averaged. What a function of the flow reports is not.
        """
        parts: list[dict[str, Metric]] = []
        for future in self.futures:
            future.result()
            model, _, method = future.label.partition(".")
            mine = main is None or not method or model == main
            parts.append(dict(future.stats) if mine else {f"{model}/{k}": v for k, v in future.stats.items()})
            parts.append({f"time/{future.label}": Total(future.seconds)})
            if method:
                parts.append({f"memory/{model}": Max(future.peak_memory / 2**20)})
        return merge_stats(parts)


@contextmanager
def watch(cluster: Any) -> Iterator[Calls]:
    """Collect the calls that are made on ``cluster`` inside the block (on this thread; blocks do not nest)."""
    calls = Calls()
    cluster.on_call = calls.futures.append
    try:
        yield calls
    finally:
        cluster.on_call = None
