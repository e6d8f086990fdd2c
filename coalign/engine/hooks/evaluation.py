"""Hooks that evaluate a run and end it when it no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from coalign.config.errors import suggest
from coalign.config.schema.runtime import EarlyStopConfig
from coalign.engine.engine import Hook
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.engine.engine import Engine


log = logging.getLogger(__name__)


def is_improvement(value: float, best: float | None, mode: Literal["max", "min"], min_delta: float = 0.0) -> bool:
    """Tell whether ``value`` beats ``best`` (None: there is none yet) by more than ``min_delta``. NaN never does."""
    if math.isnan(value) or best is None:
        return not math.isnan(value)
    return (value - best if mode == "max" else best - value) > min_delta


class EvaluationHook(Hook):
    """Evaluates before training, every ``every`` steps, and at the end. ``report(step, stats, batches)`` is called with
    the results."""

    def __init__(self, every: int, at_start: bool, report: Callable[[int, Stats, list[BatchRef]], None]) -> None:
        self.every = every
        self.at_start = at_start
        self.report = report

    def begin(self, engine: Engine) -> None:
        if self.at_start and engine.step == 0:
            self.report(0, *self._evaluate(engine))

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if engine.complete or (self.every and engine.step % self.every == 0):
            results, batches = self._evaluate(engine)
            stats.update(results)
            self.report(engine.step, {}, batches)

    def _evaluate(self, engine: Engine) -> tuple[Stats, list[BatchRef]]:
        assert engine.evaluator is not None  # a run without evaluation data has no such hook
        engine.phase("evaluate")
        results, batches = engine.evaluator.evaluate()
        for hook in engine.hooks:
            hook.after_evaluation(engine, results)
        engine.phase("hooks")
        return results, batches


class EarlyStop(Hook):
    """Ends the run once ``patience`` evaluations in a row did not improve a metric by more than ``min_delta``.

    An evaluation before training counts: it is the first value to improve upon. NaN is no improvement.
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.waited = 0  # evaluations since the best one

    def begin(self, engine: Engine) -> None:
        self._stop_if_due(engine)

    def after_evaluation(self, engine: Engine, stats: Stats) -> None:
        """Raises ValueError if evaluation does not report the metric."""
        metric = self.config.metric
        if metric not in stats:
            names = sorted(name for name in stats if not name.startswith("time/"))
            raise ValueError(
                f"runtime.early_stop.metric: evaluation reports no '{metric}'{suggest(metric, names)}; "
                f"it reports {', '.join(names)}"
            )
        value = stats[metric].value
        if is_improvement(value, self.best, self.config.mode, self.config.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_due(engine)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def _stop_if_due(self, engine: Engine) -> None:
        if self.waited >= self.config.patience:
            reason = f"{self.config.metric} has not improved on {self.best} in {self.waited} evaluations"
            engine.progress.request_stop(reason)
            log.info("stopping early: %s", reason)
