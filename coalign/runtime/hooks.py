"""What hangs off the loop: evaluation, logs, checkpoints. A hook sees the engine after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.runtime.engine import Engine


class Hook:
    """Does nothing at each of the three moments. Hooks run in order and may add to ``stats``."""

    def begin(self, engine: Engine) -> None: ...

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None: ...

    def end(self, engine: Engine) -> None: ...


class Evaluate(Hook):
    """Before training, every ``every`` steps, and at the end. ``report(step, stats, batches)`` receives the results."""

    def __init__(self, every: int, at_start: bool, report: Callable[[int, Stats, list[Any]], None]) -> None:
        self.every = every
        self.at_start = at_start
        self.report = report

    def begin(self, engine: Engine) -> None:
        if self.at_start and engine.step == 0:
            self.report(0, *engine.evaluator.evaluate())

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if engine.step == engine.last or (self.every and engine.step % self.every == 0):
            results, batches = engine.evaluator.evaluate()
            stats.update(results)
            self.report(engine.step, {}, batches)
