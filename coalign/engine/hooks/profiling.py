"""Profiler traces of the steps that `runtime.profile` names, one for each process of its models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coalign.cluster.future import WorkerError
from coalign.config.schema import ProfileConfig
from coalign.engine.engine import Hook
from coalign.files import Sink
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine


class StepProfiler(Hook):
    """Starts traces before a step and ends them after it; see coalign.cluster.worker.

    With staleness, a trace shows what a model computes during the step, also for other steps. Models that share one
    process are in one trace.
    """

    def __init__(self, config: ProfileConfig, folder: Path, engine: Engine) -> None:
        self.config = config
        self.folder = folder
        self.models = [engine.running[name] for name in config.models or engine.running]
        if engine.cluster.store.in_process and config.tool == "torch":
            self.models = self.models[:1]  # torch traces a process, not a model
        self._engine = engine

    def phase(self, name: str) -> None:
        """The engine enters a phase; `rollout` is the first one of a step."""
        step = self._engine.step + 1
        if name == "rollout" and step in self.config.steps:
            for future in [model.start_trace(self.config, step) for model in self.models]:
                future.result()

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if engine.step in self.config.steps:
            directory = (self.folder / f"step_{engine.step}").resolve()
            for future in [model.stop_trace(str(directory)) for model in self.models]:
                with Sink(str(directory)).survive(WorkerError):
                    future.result()
