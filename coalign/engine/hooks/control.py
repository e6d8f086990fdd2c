"""Does what a run is asked for between two steps: save, stop, or compute with other numbers of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import WorkerError, WorkerLost
from coalign.engine.engine import Hook
from coalign.engine.fleet import Fleet
from coalign.engine.hooks.checkpoint import Save
from coalign.files import Sink, describe_problem
from coalign.run_files.control import NAME, ControlRequest, ControlResult, read_request, write_answer
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)


class RunControl(Hook):
    """Serves the requests of coalign.run_files.control after each step. What is refused changes nothing.

    Then the ``fleet`` adapts. ``stopped``: whether a request has ended the run.
    """

    def __init__(self, run: Path, save: Save, fleet: Fleet) -> None:
        self.run = run
        self.save = save
        self.fleet = fleet
        self.stopped = False
        self._sink = Sink(str(run / NAME))

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self._answer(engine)
        self.fleet.adapt(engine, stats)
        engine.phase("hooks")

    def _answer(self, engine: Engine) -> None:
        with self._sink.survive():
            if (pending := read_request(self.run)) is None:
                return
        results = [result for content in pending.requests for result in self._serve(engine, content)]
        for result in results:
            log.warning("asked to %s: %s", result.do or "do something", result.text)
        with self._sink.survive():
            write_answer(self.run, pending.id, results)

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
        engine.phase("scale")
        for name, processes in models.items():
            try:
                yield ControlResult("scale", True, self.fleet.resize(engine, name, processes))
            except (ValueError, OSError) as problem:
                yield ControlResult("scale", False, f"{name}: refused: {problem}")
            except WorkerError as problem:  # new replicas could not load the model
                if name in engine.learning:
                    raise
                yield ControlResult("scale", False, f"{name}: refused: {problem}")


def _try(verb: str, work: Callable[[Engine], str], engine: Engine) -> ControlResult:
    try:
        return ControlResult(verb, True, work(engine))
    except WorkerLost:  # the engine starts it again, and then the hook serves the request once more
        raise
    except Exception as problem:  # writers of tensors report a full disk by errors of their own
        text = str(problem) if isinstance(problem, ValueError) else describe_problem(problem)
        return ControlResult(verb, False, f"refused: {text}")
