"""Serves requests to a run between two steps: save, stop, or change numbers of processes.

``RunControl`` serves requests of other processes, ``StopSignals`` the signals of the system.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import WorkerError
from coalign.engine.engine import Hook, contain_errors
from coalign.engine.fleet import Fleet
from coalign.files import Sink, describe_problem
from coalign.run_files.control import NAME, ControlRequest, ControlResult, read_request, write_answer
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)
ECHO_SECONDS = 0.5  # the same signal within this time is the same request


class RunControl(Hook):
    """Serves the requests of coalign.run_files.control after each step. A refused request changes nothing.

    Then the ``fleet`` adapts. ``save`` writes a checkpoint of the last step, and returns its path. ``stopped``: whether
    a request has ended the run.
    """

    def __init__(self, run: Path, save: Callable[[Engine], Path], fleet: Fleet) -> None:
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
        """Raises ValueError after an unhealthy step, and what writing raises."""
        if not engine.progress.healthy:
            raise ValueError(f"step {engine.step} is unhealthy (runtime.guards), and is not saved")
        engine.phase("save")
        return f"step {engine.step} is in {self.save(engine)}"

    def _stop(self, engine: Engine) -> str:
        engine.phase("save")
        saved = self.save(engine)
        if not engine.complete:
            self.stopped = True
            engine.progress.request_stop("asked to stop")
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
    problems: list[Exception] = []
    with contain_errors(problems.append):  # libraries that write tensors report a full disk by their own error types
        return ControlResult(verb, True, work(engine))
    [problem] = problems
    text = str(problem) if isinstance(problem, ValueError) else describe_problem(problem)
    return ControlResult(verb, False, f"refused: {text}")


class Preempted(Exception):
    """The machine will soon be taken away, and the loop was only waiting for samples."""


class StopSignals:
    """Lets Ctrl-C, SIGTERM and SIGHUP (a closed terminal) end a run, as a context manager.

    A run that trains ends after the current step, with a checkpoint. A second signal, or one before training, ends it
    at once, by a KeyboardInterrupt. The same signal within ECHO_SECONDS is no second one: `timeout` and some schedulers
    send theirs to a process and then to its group. ``first`` is the first signal's number. ``notice``: seconds between
    SIGTERM and the end of the machine (None: no limit); a step that still waits for samples is then abandoned, by
    Preempted.
    """

    def __init__(self, notice: float | None) -> None:
        self.notice = notice
        self.waits = False  # whether the engine waits for samples or an evaluation: no training is lost
        self.first: int | None = None
        self.engine: Engine | None = None  # set while it trains
        self._received_at = 0.0  # time of the first signal
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only; a run in another thread is stopped by its caller.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
                    self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def install(self) -> None:
        """Install the handlers again: Ray replaces them when it starts."""
        for number in self._previous_handlers:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def phase(self, name: str) -> None:
        """The engine enters a phase."""
        self.waits = name in ("rollout", "evaluate")

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == self.first and now - self._received_at < ECHO_SECONDS:
            return
        if self.first is not None or self.engine is None:
            self.first = self.first or number
            raise KeyboardInterrupt
        self.first, self._received_at = number, now
        self.engine.progress.request_stop(signal.Signals(number).name)
        if self.notice is not None and number == signal.SIGTERM:
            log.warning("SIGTERM: saving at once, within %g s (runtime.preemption_notice)", self.notice)
            if self.waits:
                raise Preempted
            return
        log.warning("%s: finishing this step, then saving; once more to stop at once", signal.Signals(number).name)
