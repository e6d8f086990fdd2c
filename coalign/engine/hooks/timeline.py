"""What every worker did in a step, when, and what waited: idle shares as metrics, and a trace that Perfetto opens.

Times are taken anyway (a call says when each worker computed), so nothing is measured that would not be otherwise.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.cluster.future import MOVE, Call, Future, Outcome, Span
from coalign.engine.engine import Hook
from coalign.types import Stat, Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

LOOP = "loop"  # the row of the engine's phases
_NOTICED = 1e-3  # seconds that a call has to wait before anybody wants to see it


@dataclass(frozen=True, slots=True)
class Event:
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
    """Adds `idle/<model>` (the share of the step in which the model's workers did not compute) to every step's metrics,
    and writes ``folder/step_N.json`` every ``every`` steps (0: never). A call that goes on into the next step counts in
    both, each time with its part.

    ``note`` hears of every call that has ended, on any thread; ``phase`` of what the engine waits for.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self._ended: deque[Event] = deque()
        self._phases: list[tuple[float, str]] = []  # of the step, and when each began

    def note(self, future: Future, outcome: Outcome) -> None:
        """A call has ended."""
        self._ended.append(Event(future.call, future.made, tuple(future.spans), outcome.memory))

    def phase(self, name: str) -> None:
        """The engine enters a phase; `rollout` is the first one of a step."""
        if name == "rollout":
            self._phases.clear()
        self._phases.append((time.time(), name))

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        begun, ended = self._phases[0][0], time.time()
        events = [self._ended.popleft() for _ in range(len(self._ended))]
        events = [event for event in events if event.stop > begun] + under_way(engine.cluster.under_way(), ended)
        processes = {name: model.processes for name, model in engine.cluster.models.items()}
        stats |= {f"idle/{name}": Stat(n) for name, n in idle(events, processes, begun, ended).items()}
        if self.every and engine.step % self.every == 0:
            self.folder.mkdir(exist_ok=True)
            trace = chrome_trace([*phases(self._phases, ended), *events], begun, ended)
            (self.folder / f"step_{engine.step}.json").write_text(json.dumps(trace))


def phases(entered: Sequence[tuple[float, str]], ended: float) -> list[Event]:
    """The phases of a step, each of which lasts until the next one."""
    stops = [when for when, _ in entered[1:]] + [ended]
    spans = [Span(LOOP, "", start, stop - start) for (start, _), stop in zip(entered, stops, strict=True)]
    return [Event(Call(LOOP, name), start, (span,)) for (start, name), span in zip(entered, spans, strict=True)]


def under_way(futures: Sequence[Future], now: float) -> list[Event]:
    """What has been computed until now of calls that have not ended."""
    events = []
    for future in futures:
        running = [each for each in future.running if not each.meta.done()]
        busy = [Span(each.where, "", each.since, now - each.since) for each in running]
        events.append(Event(future.call, future.made, (*future.spans, *busy)))
    return events


def idle(events: Sequence[Event], processes: Mapping[str, int], begun: float, ended: float) -> dict[str, float]:
    """The share of begun..ended in which the processes of each model did nothing for it."""
    busy = dict.fromkeys(processes, 0.0)
    for event in events:
        for span in event.spans:
            model = span.where.partition(",")[0]
            if model in busy and span.verb != MOVE:
                busy[model] += max(0.0, min(ended, span.start + span.seconds) - max(begun, span.start))
    whole = max(ended - begun, 1e-9)
    return {name: max(0.0, 1.0 - seconds / (whole * processes[name])) for name, seconds in busy.items()}


def chrome_trace(events: Sequence[Event], begun: float, ended: float) -> dict[str, Any]:
    """The trace event format of Chrome (Perfetto, chrome://tracing): a process for each model, a thread for each of its
    replicas or ranks, and how long calls waited for their inputs, their turn or their device. Times are cut to
    begun..ended."""
    rows, out = _Rows(), []
    micro = lambda when: round((min(max(when, begun), ended) - begun) * 1e6)  # noqa: E731
    for event in events:
        called = event.call.method
        arguments = {"label": str(event.call), "MiB": round(event.memory / 2**20)}
        starts: dict[str, float] = {}
        for span in sorted(event.spans, key=lambda span: span.start):
            start, stop = micro(span.start), micro(span.start + span.seconds)
            name = MOVE if span.verb == MOVE else called
            out.append({"ph": "X", "name": name, "ts": start, "dur": stop - start, "args": arguments})
            out[-1] |= rows.place(span.where)
            starts.setdefault(span.where, start)
        for where, start in (starts or {event.call.model or called: micro(ended)}).items():
            if start - micro(event.made) > _NOTICED * 1e6:
                waiting = {"cat": "waiting", "name": f"{called} waits", "id": len(out), **rows.place(where)}
                out += [{"ph": "b", "ts": micro(event.made), **waiting}, {"ph": "e", "ts": start, **waiting}]
    return {"traceEvents": rows.names + out, "displayTimeUnit": "ms"}


class _Rows:
    """Numbers for models (processes of a trace) and their processes (threads), in the order in which they come up."""

    def __init__(self) -> None:
        self.names: list[dict[str, Any]] = []
        self._places: dict[str, dict[str, int]] = {}
        self._models: dict[str, int] = {}
        self._threads: Counter[str] = Counter()

    def place(self, where: str) -> dict[str, int]:
        if where not in self._places:
            model, _, process = where.partition(", ")
            if model not in self._models:
                self._models[model] = len(self._models) + 1
                self._name("process_name", model, {"pid": self._models[model], "tid": 0})
            self._threads[model] += 1
            self._places[where] = {"pid": self._models[model], "tid": self._threads[model]}
            self._name("thread_name", process or model, self._places[where])
        return self._places[where]

    def _name(self, kind: str, name: str, place: dict[str, int]) -> None:
        self.names.append({"ph": "M", "name": kind, "args": {"name": name}, **place})
