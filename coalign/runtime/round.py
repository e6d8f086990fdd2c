"""One run of a flow on some prompts: where its batch will be, the calls that make it, when it was begun."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coalign.cluster.future import BatchRef, Future
from coalign.runtime.calls import Calls
from coalign.types import Max, Stat, Stats, Total, merge_stats

KINDS = {kind.__name__: kind for kind in (Stat, Max, Total)}


@dataclass
class Round:
    """``batch`` is None where nothing had to be begun; ``aim`` is how many groups were hoped for."""

    version: int  # of the weights it was begun with
    aim: int = 0
    batch: Future | BatchRef | None = None
    calls: Calls = field(default_factory=Calls)
    before: Stats = field(default_factory=dict)  # metrics of its calls before a restart

    def wait(self) -> tuple[BatchRef | None, Stats]:
        """(batch, merged metrics of its calls). Raises what a call raised."""
        batch = self.batch.result() if isinstance(self.batch, Future) else self.batch
        return batch, merge_stats([self.before, self.calls.stats()])

    def state_dict(self) -> dict[str, Any]:
        """Waits for it: after a restart its weights are gone."""
        batch, stats = self.wait()
        coded = {name: [type(metric).__name__, *_numbers(metric)] for name, metric in stats.items()}
        return {
            "version": self.version,
            "aim": self.aim,
            "stats": coded,
            "batch": None if batch is None else batch.fetch(),
        }

    @staticmethod
    def restored(state: dict[str, Any], cluster: Any) -> Round:
        """The round that ``state_dict`` described, finished."""
        before = {name: KINDS[kind](*numbers) for name, (kind, *numbers) in state["stats"].items()}
        batch = state["batch"]
        ref = None if batch is None else cluster.put(batch)
        return Round(state["version"], state["aim"], ref, before=before)


def _numbers(metric: Stat | Max | Total) -> list[float]:
    return [metric.sum, metric.count] if isinstance(metric, Stat) else [metric.value]
