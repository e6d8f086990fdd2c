"""Records when every worker computed in a step: idle shares as metrics, and a trace for Perfetto.

The times come from the reports of calls. ``StepProfiler`` has the processes trace the inside of calls in some steps.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import MOVE, Call, Future, Outcome, Span, WorkerError
from coalign.config.schema import ProfileConfig
from coalign.engine.engine import Hook
from coalign.files import Sink
from coalign.types import Stat, Stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.engine.engine import Engine

LOOP = "loop"  # the row of the engine's phases
_MIN_WAIT_SECONDS = 1e-3  # shorter waits are not drawn


@dataclass(frozen=True, slots=True)
class _CallEvent:
    """A call in the trace: ``made`` and each span's start are seconds since the epoch, ``memory`` is in bytes."""

    call: Call
    made: float
    spans: tuple[Span, ...]
    memory: int = 0

    @property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=self.made)

    @property
    def stop(self) -> float:
        return max((span.start + span.seconds for span in self.spans), default=self.made)


class Timeline(Hook):
    """Adds `idle/<model>` to every step's metrics and writes ``folder/step_N.json`` every ``every`` steps (0: never).

    `idle/<model>` is the share of the step in which the model's workers did not compute. A call that lasts into the
    next step counts in both, with its time in each.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self._sink = Sink(str(folder))
        self._ended: deque[_CallEvent] = deque()
        self._phases: list[tuple[float, str]] = []  # (start, phase) since the last trace

    def note(self, future: Future, outcome: Outcome) -> None:
        """Record a call that has ended. Any thread may call this."""
        self._ended.append(_CallEvent(future.call, future.created_at, tuple(future.spans), outcome.memory))

    def phase(self, name: str) -> None:
        """The engine enters a phase; `rollout` is the first one of a step."""
        self._phases.append((time.time(), name))

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        ended_at = time.time()
        started_at = next(entered_at for entered_at, name in reversed(self._phases) if name == "rollout")
        events = [self._ended.popleft() for _ in range(len(self._ended))]
        events += _list_running_calls(engine.cluster.list_pending_calls(), ended_at)
        processes = {name: model.processes for name, model in engine.cluster.models.items()}
        shares = _compute_idle_shares(events, processes, started_at, ended_at)
        stats |= {f"idle/{name}": Stat(share) for name, share in shares.items()}
        phases, self._phases = self._phases, [(ended_at, self._phases[-1][1])]
        if self.every and engine.step % self.every == 0:
            since = phases[0][0]  # includes the hooks after the last step, and attempts that were lost
            shown = [event for event in events if event.stop > since]
            trace = _build_trace([*_build_phase_events(phases, ended_at), *shown], since, ended_at)
            with self._sink.survive():
                self.folder.mkdir(exist_ok=True)
                (self.folder / f"step_{engine.step}.json").write_text(json.dumps(trace))


class StepProfiler(Hook):
    """Starts traces before a step and ends them after it; see coalign.cluster.worker.

    With staleness, a trace shows everything that a model computes during the step, also for other steps. Models that
    share one process are in one trace.
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
            for future in [model.trace("start_trace", self.config, step) for model in self.models]:
                future.result()

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if engine.step in self.config.steps:
            directory = (self.folder / f"step_{engine.step}").resolve()
            for future in [model.trace("stop_trace", str(directory)) for model in self.models]:
                with Sink(str(directory)).survive(WorkerError):
                    future.result()


def _build_phase_events(entered: Sequence[tuple[float, str]], ended: float) -> list[_CallEvent]:
    """Return the phases of a step as events. Each phase lasts until the next one."""
    stops = [when for when, _ in entered[1:]] + [ended]
    return [
        _CallEvent(Call(LOOP, name), start, (Span(LOOP, "", start, stop - start),))
        for (start, name), stop in zip(entered, stops, strict=True)
    ]


def _list_running_calls(futures: Sequence[Future], now: float) -> list[_CallEvent]:
    """Return calls that have not ended as events, with the time computed until now."""
    events = []
    for future in futures:
        running = [task for task in future.running if not task.meta.done()]
        busy = [Span(task.worker, "", task.submitted_at, now - task.submitted_at) for task in running]
        events.append(_CallEvent(future.call, future.created_at, (*future.spans, *busy)))
    return events


def _compute_idle_shares(
    events: Sequence[_CallEvent], processes: Mapping[str, int], started_at: float, ended_at: float
) -> dict[str, float]:
    """Return the share of ``started_at`` to ``ended_at`` in which the processes of each model did not compute."""
    busy = dict.fromkeys(processes, 0.0)
    for event in events:
        for span in event.spans:
            model = span.worker.partition(",")[0]
            if model in busy and span.verb != MOVE:
                busy[model] += max(0.0, min(ended_at, span.start + span.seconds) - max(started_at, span.start))
    duration = max(ended_at - started_at, 1e-9)
    return {name: max(0.0, 1.0 - seconds / (duration * processes[name])) for name, seconds in busy.items()}


def _build_trace(events: Sequence[_CallEvent], started_at: float, ended_at: float) -> dict[str, Any]:
    """Return a trace from ``started_at`` to ``ended_at`` in Chrome's trace event format (Perfetto, chrome://tracing).

    Each model is a process of the trace, each of its replicas or ranks a thread. Asynchronous slices show how long
    calls waited for their inputs, their turn or their device.
    """
    rows, out = _TraceRows(), []
    to_micros = lambda when: round((min(max(when, started_at), ended_at) - started_at) * 1e6)  # noqa: E731
    for event in events:
        method = event.call.method
        arguments = {"label": str(event.call), "MiB": round(event.memory / 2**20)}
        starts: dict[str, float] = {}
        for span in sorted(event.spans, key=lambda span: span.start):
            start, stop = to_micros(span.start), to_micros(span.start + span.seconds)
            name = MOVE if span.verb == MOVE else method
            out.append({"ph": "X", "name": name, "ts": start, "dur": stop - start, "args": arguments})
            out[-1] |= rows.find(span.worker)
            starts.setdefault(span.worker, start)
        for process, start in (starts or {event.call.model or method: to_micros(ended_at)}).items():
            if start - to_micros(event.made) > _MIN_WAIT_SECONDS * 1e6:
                waiting = {"cat": "waiting", "name": f"{method} waits", "id": len(out), **rows.find(process)}
                out += [{"ph": "b", "ts": to_micros(event.made), **waiting}, {"ph": "e", "ts": start, **waiting}]
    return {"traceEvents": rows.names + out, "displayTimeUnit": "ms"}


class _TraceRows:
    """Numbers models (`pid`) and their processes (`tid`) in order of their first call."""

    def __init__(self) -> None:
        self.names: list[dict[str, Any]] = []
        self._rows: dict[str, dict[str, int]] = {}
        self._models: dict[str, int] = {}
        self._threads: Counter[str] = Counter()

    def find(self, process: str) -> dict[str, int]:
        if process not in self._rows:
            model, _, rank = process.partition(", ")
            if model not in self._models:
                self._models[model] = len(self._models) + 1
                self._name("process_name", model, {"pid": self._models[model], "tid": 0})
            self._threads[model] += 1
            self._rows[process] = {"pid": self._models[model], "tid": self._threads[model]}
            self._name("thread_name", rank or model, self._rows[process])
        return self._rows[process]

    def _name(self, label: str, name: str, row: dict[str, int]) -> None:
        self.names.append({"ph": "M", "name": label, "args": {"name": name}, **row})
