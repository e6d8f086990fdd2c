"""One run of a flow on some prompts: where its batch will be, the calls that make it, when it was begun."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, get_args

from coalign.cluster.future import BatchRef, Future
from coalign.runtime.calls import Calls
from coalign.types import Metric, Stats, merge_stats

KINDS = {kind.__name__: kind for kind in get_args(Metric)}


@dataclass
class Round:
    """``batches`` by name: `groups` (those to train on), and small ones that say something of them: `ages`
    (describe.group_ages), `shares` (curriculum.pass_rates), `lengths` (lengths.response_lengths). None are in it where
    nothing had to be begun."""

    version: int  # of the weights it was begun with
    aim: int = 0  # groups hoped for
    batches: dict[str, Future | BatchRef] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    before: Stats = field(default_factory=dict)  # metrics of what came before its calls, or before a restart

    def wait(self) -> tuple[dict[str, BatchRef], Stats]:
        """(batches, merged metrics of its calls). Raises what a call raised."""
        done = {name: b.result() if isinstance(b, Future) else b for name, b in self.batches.items()}
        return done, merge_stats([self.before, self.calls.stats()])

    def state_dict(self) -> dict[str, Any]:
        """Waits for it: after a restart its weights are gone."""
        batches, stats = self.wait()
        coded = {name: [type(metric).__name__, *astuple(metric)] for name, metric in stats.items()}
        fetched = {name: batch.fetch() for name, batch in batches.items()}
        return {"version": self.version, "aim": self.aim, "stats": coded, "batches": fetched}

    @staticmethod
    def restored(state: dict[str, Any], cluster: Any) -> Round:
        """The round that ``state_dict`` described, finished."""
        before = {name: KINDS[kind](*numbers) for name, (kind, *numbers) in state["stats"].items()}
        batches = {name: cluster.put(batch) for name, batch in state["batches"].items()}
        return Round(state["version"], state["aim"], batches, before=before)
