"""Where the loop of a run stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coalign.types import Stats, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef


@dataclass
class Progress:
    """Where the loop stands. Everybody may read it; only these methods change it.

    ``tokens``: those that the main model was trained on. ``healthy``: whether the last step passed the guards
    (coalign.engine.hooks.guards). ``consistent_state``: the engine's `snapshot` after the last step; None while a step
    trains. ``stats`` and ``learned`` are the last step's metrics, and its batch with advantages if tokens are logged.
    """

    step: int = 0
    tokens: int = 0
    stop_reason: str | None = None
    healthy: bool = True
    consistent_state: dict[str, Any] | None = None
    stats: Stats = field(default_factory=dict)
    learned: BatchRef | None = None
    _late_metrics: Stats = field(default_factory=dict)

    def request_stop(self, reason: str) -> None:
        """End the loop after this step; the newest reason counts."""
        self.stop_reason = reason

    def report_late(self, stats: Stats) -> None:
        """Record metrics of work that outlived its step (a checkpoint's upload) with the next step."""
        self._late_metrics = self._late_metrics | stats

    def judge_step(self, healthy: bool) -> None:
        """Keep what the guards say of the last step."""
        self.healthy = healthy

    def begin_step(self) -> None:
        """Let go of the last step's batch."""
        self.learned = None

    def count_step(self, tokens: int, stats: list[Stats]) -> Stats:
        """Count a step that trained on so many tokens; return its metrics with those that came late."""
        self.step += 1
        self.tokens += tokens
        return merge_stats([self._late_metrics, *stats])

    def end_step(self, state: dict[str, Any], stats: Stats, learned: BatchRef | None) -> None:
        """Keep what a step that no hook refused leaves behind."""
        self.consistent_state, self.stats, self.learned = state, stats, learned
        self._late_metrics = {}

    def keep_state(self, state: dict[str, Any] | None) -> None:
        """Keep the state that the loop can return to; None: there is none until the step ends, or one is loaded."""
        self.consistent_state = state

    def return_to(self, step: int, tokens: int) -> None:
        """Go on from a saved state."""
        self.step, self.tokens = step, tokens
