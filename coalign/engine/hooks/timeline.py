"""What every worker did in a step, when, and what waited: idle shares as metrics, and a trace for Perfetto.

Every call reports when each worker computed, so the timeline measures nothing of its own. ``StepProfiler`` has the
processes trace what they do inside of the calls of some steps.
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
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

LOOP = "loop"  # the row of the engine's phases
_SHORTEST_WAIT = 1e-3  # seconds; a shorter wait is not drawn


@dataclass(frozen=True, slots=True)
class CallEvent:
    """A call as it is drawn: ``made`` and each span's start are seconds since the epoch, ``memory`` is in bytes."""

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
    next step counts in both, each time with its part.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self._sink = Sink(str(folder))
        self._ended: deque[CallEvent] = deque()
        self._phases: list[tuple[float, str]] = []  # since the last trace, and when each began

    def note(self, future: Future, outcome: Outcome) -> None:
        """Take note of a call that has ended. Any thread may call this."""
        self._ended.append(CallEvent(future.call, future.created_at, tuple(future.spans), outcome.memory))

    def phase(self, name: str) -> None:
        """The engine enters a phase; `rollout` is the first one of a step."""
        self._phases.append((time.time(), name))

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        ended = time.time()
        begun = next(when for when, name in reversed(self._phases) if name == "rollout")
        events = [self._ended.popleft() for _ in range(len(self._ended))]
        events += list_running_calls(engine.cluster.list_pending_calls(), ended)
        processes = {name: model.processes for name, model in engine.cluster.models.items()}
        shares = compute_idle_shares(events, processes, begun, ended)
        stats |= {f"idle/{name}": Stat(share) for name, share in shares.items()}
        phases, self._phases = self._phases, [(ended, self._phases[-1][1])]
        if self.every and engine.step % self.every == 0:
            since = phases[0][0]  # what hooks did after the last step, and attempts that were lost, are shown, too
            shown = [event for event in events if event.stop > since]
            trace = build_trace([*build_phase_events(phases, ended), *shown], since, ended)
            with self._sink.survive():
                self.folder.mkdir(exist_ok=True)
                (self.folder / f"step_{engine.step}.json").write_text(json.dumps(trace))


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


def build_phase_events(entered: Sequence[tuple[float, str]], ended: float) -> list[CallEvent]:
    """Return the phases of a step as events. Each phase lasts until the next one."""
    stops = [when for when, _ in entered[1:]] + [ended]
    return [
        CallEvent(Call(LOOP, name), start, (Span(LOOP, "", start, stop - start),))
        for (start, name), stop in zip(entered, stops, strict=True)
    ]


def list_running_calls(futures: Sequence[Future], now: float) -> list[CallEvent]:
    """Return what has been computed until now of calls that have not ended."""
    events = []
    for future in futures:
        running = [each for each in future.running if not each.meta.done()]
        busy = [Span(each.worker, "", each.submitted_at, now - each.submitted_at) for each in running]
        events.append(CallEvent(future.call, future.created_at, (*future.spans, *busy)))
    return events


def compute_idle_shares(
    events: Sequence[CallEvent], processes: Mapping[str, int], begun: float, ended: float
) -> dict[str, float]:
    """Return the share of begun..ended in which the processes of each model did not compute."""
    busy = dict.fromkeys(processes, 0.0)
    for event in events:
        for span in event.spans:
            model = span.worker.partition(",")[0]
            if model in busy and span.verb != MOVE:
                busy[model] += max(0.0, min(ended, span.start + span.seconds) - max(begun, span.start))
    whole = max(ended - begun, 1e-9)
    return {name: max(0.0, 1.0 - seconds / (whole * processes[name])) for name, seconds in busy.items()}


def build_trace(events: Sequence[CallEvent], begun: float, ended: float) -> dict[str, Any]:
    """Return a trace in Chrome's trace event format (Perfetto, chrome://tracing), with times cut to begun..ended.

    Each model is a process of the trace, each of its replicas or ranks a thread. Asynchronous slices show how long
    calls waited for their inputs, their turn or their device.
    """
    rows, out = _TraceRows(), []
    to_micros = lambda when: round((min(max(when, begun), ended) - begun) * 1e6)  # noqa: E731
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
        for where, start in (starts or {event.call.model or method: to_micros(ended)}).items():
            if start - to_micros(event.made) > _SHORTEST_WAIT * 1e6:
                waiting = {"cat": "waiting", "name": f"{method} waits", "id": len(out), **rows.find(where)}
                out += [{"ph": "b", "ts": to_micros(event.made), **waiting}, {"ph": "e", "ts": start, **waiting}]
    return {"traceEvents": rows.names + out, "displayTimeUnit": "ms"}


class _TraceRows:
    """Numbers models (`pid`) and their processes (`tid`) in the order in which they come up."""

    def __init__(self) -> None:
        self.names: list[dict[str, Any]] = []
        self._rows: dict[str, dict[str, int]] = {}
        self._models: dict[str, int] = {}
        self._threads: Counter[str] = Counter()

    def find(self, where: str) -> dict[str, int]:
        if where not in self._rows:
            model, _, process = where.partition(", ")
            if model not in self._models:
                self._models[model] = len(self._models) + 1
                self._name("process_name", model, {"pid": self._models[model], "tid": 0})
            self._threads[model] += 1
            self._rows[where] = {"pid": self._models[model], "tid": self._threads[model]}
            self._name("thread_name", process or model, self._rows[where])
        return self._rows[where]

    def _name(self, kind: str, name: str, row: dict[str, int]) -> None:
        self.names.append({"ph": "M", "name": kind, "args": {"name": name}, **row})
