"""Measures where the wall time of a run went: training, waiting, and work that was discarded.

The engine announces what it waits for (``Engine.phase``), so every second has one cause and the causes add up to the
wall time. A resumed run goes on counting; the time between two starts does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import StepLog
from coalign.types import Stat, Stats, Total

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.engine.engine import Engine

# Phase of the loop -> the cause that its seconds are counted under.
_CAUSES = {
    "start": "start",
    "train": "trained",
    "rollout": "rollout",
    "sync": "sync",
    "save": "checkpoint",
    "evaluate": "evaluation",
    "hooks": "hooks",
    "restart": "restart",
    "scale": "restart",  # processes that come or go
}
_STEP_CAUSES: tuple[str, ...] = ("rollout", "trained")
CAUSES = (*dict.fromkeys(_CAUSES.values()), "redone")
# Counts of tokens that were generated and never trained on -> why.
_DROPPED = {
    "filter/dropped_tokens": "filter",
    "rollout/given_up_tokens": "given_up",
    "rollout/cut_tokens": "cut",
}
_DROPPED_CAUSES = (*_DROPPED.values(), "expired")


class Goodput(Hook):
    """Adds the shares of the run so far to every step's metrics.

    - `goodput/<cause>`: shares of the wall time, which add up to 1. ``redone`` is the time of steps that were refused,
      rolled back, or trained after the checkpoint from which the run was resumed.
    - `time/run`: the wall time in seconds.
    - `tokens_dropped/<cause>`: shares of the tokens generated for the accepted steps. The tokens of expired groups are
      not counted but estimated from the step's mean response.

    ``log`` is the run's metrics.jsonl, which says how long the run went on after the checkpoint it is resumed from.
    """

    def __init__(self, log: StepLog, clock: Callable[[], float] = time.monotonic) -> None:
        """Start counting; ``clock`` returns seconds."""
        self._log = log
        self._clock = clock
        self._since = clock()
        self._cause = "start"
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._step = dict.fromkeys(_STEP_CAUSES, 0.0)  # the current step's seconds: it may yet be refused
        self._generated = 0.0
        self._dropped = dict.fromkeys(_DROPPED_CAUSES, 0.0)

    def phase(self, name: str) -> None:
        """The engine enters a phase: `rollout` begins a step, and `sync` after `train` means that it was accepted."""
        self._settle()
        if name == "rollout":
            self._discard_step()
        elif name == "sync":
            for cause in _STEP_CAUSES:
                self._seconds[cause] += self._step[cause]
                self._step[cause] = 0.0
        self._cause = _CAUSES.get(name, "hooks")  # hooks may announce further phases

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        count = lambda name: stats[name].value if name in stats else 0.0  # noqa: E731
        dropped = {cause: count(name) for name, cause in _DROPPED.items()}
        dropped["expired"] = (
            count("rollout/expired") * engine.config.runtime.samples_per_prompt * count("tokens/response")
        )
        # `tokens/generated` counts complete groups before the filter, so none that were given up or cut.
        self._generated += count("tokens/generated") + dropped["given_up"] + dropped["cut"]
        for cause in _DROPPED_CAUSES:
            self._dropped[cause] += dropped[cause]
        stats |= self.measure()

    def after_rewind(self, state: dict[str, Any], *, repeat: bool) -> None:
        """Count the time since the checkpoint as redone, except that of starting processes."""
        self._settle()
        self._discard_step()
        now = self._seconds
        lost = {cause: now[cause] for cause in ("start", "restart")}
        self._seconds = dict.fromkeys(CAUSES, 0.0) | state.get("seconds", {}) | lost
        self._seconds["redone"] += sum(now.values()) - sum(self._seconds.values())
        self._restore_tokens(state)
        self._cause = "redone"  # until the next step begins

    def measure(self) -> Stats:
        """Return the metrics of the run until now."""
        seconds = self._sum_seconds()
        wall_time = sum(seconds.values()) or 1.0
        stats: Stats = {f"goodput/{cause}": Stat(seconds[cause] / wall_time) for cause in CAUSES}
        stats["time/run"] = Total(sum(seconds.values()))
        if self._generated:
            stats |= {f"tokens_dropped/{why}": Stat(count / self._generated) for why, count in self._dropped.items()}
        return stats

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._sum_seconds(), "generated": self._generated, "dropped": self._dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seconds = dict.fromkeys(CAUSES, 0.0) | state["seconds"]
        self._restore_tokens(state)
        self._seconds["redone"] += max(0.0, self._log.find_maximum("time/run") - sum(self._seconds.values()))

    def _restore_tokens(self, state: dict[str, Any]) -> None:
        self._generated = state.get("generated", 0.0)
        self._dropped = dict.fromkeys(_DROPPED_CAUSES, 0.0) | state.get("dropped", {})

    def _settle(self) -> None:
        """Add the time since the last call to its cause."""
        now = self._clock()
        # A step's time counts as redone if it is not accepted.
        (self._step if self._cause in _STEP_CAUSES else self._seconds)[self._cause] += now - self._since
        self._since = now

    def _discard_step(self) -> None:
        self._seconds["redone"] += sum(self._step.values())
        self._step = dict.fromkeys(_STEP_CAUSES, 0.0)

    def _sum_seconds(self) -> dict[str, float]:
        """Return the seconds of each cause until now; those of a step that is not accepted yet count as redone."""
        self._settle()
        return self._seconds | {"redone": self._seconds["redone"] + sum(self._step.values())}
