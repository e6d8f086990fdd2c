"""Does what a run is asked for between two steps: save, stop, or compute with other numbers of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import WorkerError, WorkerLost
from coalign.engine.engine import Hook
from coalign.engine.hooks.checkpoint import Save
from coalign.engine.hooks.recovery import Recovery
from coalign.files import Sink, describe_problem
from coalign.run_files.control import NAME, ControlRequest, ControlResult, read_request, write_answer
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


class RunControl(Hook):
    """Serves the requests of coalign.run_files.control after each step. What is refused changes nothing.

    ``stopped``: whether a request has ended the run.
    """

    def __init__(self, run: Path, save: Save, recovery: Recovery) -> None:
        self.run = run
        self.save = save
        self.recovery = recovery
        self.stopped = False
        self._sink = Sink(str(run / NAME))

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        with self._sink.survive():
            if (pending := read_request(self.run)) is None:
                return
        results = [result for content in pending.requests for result in self._serve(engine, content)]
        for result in results:
            log.warning("asked to %s: %s", result.do or "do something", result.text)
        with self._sink.survive():
            write_answer(self.run, pending.id, results)
        engine.phase("hooks")

    def _serve(self, engine: Engine, content: Any) -> Iterator[ControlResult]:
        try:
            request = ControlRequest.parse(content)
        except ValueError as problem:
            yield ControlResult("", False, f"refused: {problem}")
            return
        if request.do == "scale":
            yield from self._scale(engine, request.models)
        else:
            yield _try(request.do, self._save if request.do == "save" else self._stop, engine)

    def _save(self, engine: Engine) -> str:
        """Raises ValueError for weights that a guard looks at, and what writing raises."""
        if not engine.healthy:
            raise ValueError(f"step {engine.step} is unhealthy (runtime.guards), and is not saved")
        engine.phase("save")
        return f"step {engine.step} is in {self.save.save_now(engine)}"

    def _stop(self, engine: Engine) -> str:
        engine.phase("save")
        saved = self.save.save_now(engine)
        if not engine.complete:
            self.stopped, engine.stop = True, "asked to stop"
        return f"the run ends after step {engine.step}, which is in {saved}"

    def _scale(self, engine: Engine, models: Mapping[str, int]) -> Iterator[ControlResult]:
        engine.phase("restart")
        for name, processes in models.items():
            try:
                self._resize(engine, name, processes)
                yield ControlResult("scale", True, f"{name}: {processes} processes since step {engine.step}")
            except (ValueError, OSError) as problem:
                yield ControlResult("scale", False, f"{name}: refused: {problem}")
            except WorkerError as problem:  # new replicas could not load the model
                if name in engine.learning:
                    raise
                yield ControlResult("scale", False, f"{name}: refused: {problem}")

    def _resize(self, engine: Engine, name: str, processes: int) -> None:
        """Raises ValueError for what cannot be, and OSError if a training state finds no place in memory."""
        if name not in engine.running:
            raise ValueError(f"there is no model of that name; there are {', '.join(engine.running)}")
        engine.training.finish()
        if name in engine.learning:
            saved = self.recovery.save_now(engine)
            engine.cluster.resize(name, processes)
            engine.running[name].load(str(saved / "models" / name)).result()
        else:
            engine.cluster.resize(name, processes)
        engine.training.reconnect()
        engine.training.sync(engine.step)


def _try(verb: str, work: Callable[[Engine], str], engine: Engine) -> ControlResult:
    try:
        return ControlResult(verb, True, work(engine))
    except WorkerLost:  # the engine starts it again, and then the hook serves the request once more
        raise
    except Exception as problem:  # writers of tensors report a full disk by errors of their own
        text = str(problem) if isinstance(problem, ValueError) else describe_problem(problem)
        return ControlResult(verb, False, f"refused: {text}")
