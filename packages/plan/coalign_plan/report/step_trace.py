"""Draws a predicted step beside the newest measured one of the run, as a picture or as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coalign.report.plots import find_newest_timeline, plot_timeline
from coalign_plan.prediction import StepPrediction

METHODS = {  # what the engine's timeline calls the phases of a prediction
    "generate": "generate",
    "score": "forward_step",
    "train": "train_step",
}


def draw_trace(prediction: StepPrediction, folder: Path, target: Path) -> str:
    """Write a trace (`.json`) or a picture (`.png`) of a predicted step; return a line that says what it shows.

    Beside it stands the newest timeline in the run ``folder``, if there is one. ValueError for another kind of file,
    or one that is there already.
    """
    if target.suffix not in (".json", ".png"):
        raise ValueError(f"--trace: {target} should end in .json (for Perfetto) or .png")
    measured = find_newest_timeline(folder)
    events = build_predicted_events(prediction)
    if measured is not None:
        events += _rename(json.loads(measured.read_text(encoding="utf-8"))["traceEvents"], len(events))
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    if target.suffix == ".json":
        with target.open("x", encoding="utf-8") as file:
            json.dump(trace, file)
    else:
        with TemporaryDirectory() as aside:
            file = Path(aside) / "a_predicted_step.json"
            file.write_text(json.dumps(trace), encoding="utf-8")
            plot_timeline(file, target)
    beside = f", beside the measured one in {measured}" if measured else f" (no timeline of a run is in {folder})"
    return f"written: {target}, the predicted step{beside}"


def build_predicted_events(prediction: StepPrediction) -> list[dict[str, Any]]:
    """Return the phases of a prediction in Chrome's trace event format: a process for each model."""
    events: list[dict[str, Any]] = []
    rows: dict[str, int] = {}
    for phase in prediction.phases:
        model = phase.model.partition(",")[0] or "loop"
        if model not in rows:
            rows[model] = len(rows) + 1
            name = {"ph": "M", "pid": rows[model], "args": {"name": f"predicted: {model}"}}
            events += [{**name, "name": "process_name", "tid": 0}, {**name, "name": "thread_name", "tid": 1}]
        start, stop = round(phase.start * 1e6), round(phase.end * 1e6)
        event = {"ph": "X", "name": METHODS.get(phase.name, phase.name), "ts": start, "dur": stop - start}
        events.append({**event, "pid": rows[model], "tid": 1, "args": {"label": phase.model, "devices": phase.devices}})
    return events


def _rename(events: list[Mapping[str, Any]], first: int) -> list[dict[str, Any]]:
    """Return the events of a measured step with numbers of their own, after ``first`` others."""
    renamed = []
    for event in events:
        event = {**event, "pid": event["pid"] + first}
        if event["name"] == "process_name":
            event["args"] = {"name": f"measured: {event['args']['name']}"}
        renamed.append(event)
    return renamed
