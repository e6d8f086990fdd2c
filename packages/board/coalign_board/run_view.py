"""What `coalign watch` shows of a run folder, as plain texts and numbers; watch.py puts them on a screen.

Everything is read from the files of the folder, while the run goes on or after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from coalign.report.plots import PLOTS, Curve, CurvePlot, choose_curves
from coalign.report.step_line import describe_goodput, format_metric, format_number, list_step_fields, smooth_metrics
from coalign.run_files.lock import read_owner
from coalign.run_files.records import name_group, parse_record, select_numbers
from coalign.run_files.state import read_state
from coalign_board.following import START, follow_growth, follow_records, follow_text

SAMPLES, LOG_LINES = 200, 500  # the newest ones are kept
MAX_CURVE_POINTS = 2000  # a longer curve loses every second point
_FILES = ("config.yaml", "metrics.jsonl", "log.txt", ".lock")  # one of them is in every run folder


class MetricsHistory:
    """The metrics of a run until now: their curves, and those of the ``last`` step and the ``previous`` one.

    ``step`` is the newest one, None before it; ``first`` has each metric's first value, ``smoothed`` the moving
    averages until the step before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = START
        self._forget()

    def _forget(self) -> None:
        self.step: int | None = None
        self.curves: dict[str, Curve] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.previous: dict[str, float] = {}
        self.smoothed: dict[str, float] = {}

    def update(self) -> bool:
        """Read what was added; return whether there was anything."""
        changed = False
        for growth in follow_growth(self.path, self._position):
            self._position, changed = growth.position, True
            if growth.replaced:
                self._forget()
            for record in filter(None, map(parse_record, growth.lines)):
                self._add(record)
        return changed

    def _add(self, record: Mapping[str, Any]) -> None:
        smooth_metrics(self.smoothed, self.last)
        self.step, self.previous = record["step"], self.last
        self.last = {name: value for name, value in select_numbers(record).items() if name != "step"}
        self.first = self.last | self.first
        for name, value in self.last.items():
            curve = self.curves.setdefault(name, [])
            curve.append((record["step"], value))
            if len(curve) > MAX_CURVE_POINTS:
                del curve[1:-1:2]


@dataclass(frozen=True)
class MetricRow:
    """A metric of the newest step, beside its value in the step before, and the first one of the run."""

    name: str
    last: str
    previous: str
    first: str


class RunView:
    """Reads a run folder, again at each `update`. Raises FileNotFoundError and ValueError if it is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no run folder {folder}")
        if not any((folder / name).exists() for name in _FILES):
            raise ValueError(f"{folder} is no run folder: it has none of {', '.join(_FILES)}")
        self.folder = folder
        self.metrics = MetricsHistory(folder / "metrics.jsonl")
        self.samples = follow_records(folder / "samples.jsonl", SAMPLES)
        self.log = follow_text(folder / "log.txt", LOG_LINES)

    def update(self) -> set[str]:
        """Read what is new; return which of `metrics`, `samples` and `log` have changed."""
        files = {"metrics": self.metrics, "samples": self.samples, "log": self.log}
        return {name for name, file in files.items() if file.update()}

    def describe_state(self) -> str:
        """Say how far the run is, and whether it is going, and where."""
        state, owner = read_state(self.folder), read_owner(self.folder)
        total = f" of {state.steps}" if state.steps else ""
        progress = "no step yet" if self.metrics.step is None else f"step {self.metrics.step}{total}"
        said = state.status if state.reason is None else f"{state.status}: {state.reason}"
        if owner is None or state.status in ("ended", "failed"):
            return f"{progress} · {said}"
        age = timedelta(seconds=max(0, round(time.time() - owner.started)))
        return f"{progress} · {said}, since {age}, process {owner.pid} on {owner.host}"

    def format_step(self) -> str:
        """Return the line of the newest step."""
        return " │ ".join(list_step_fields(self.metrics.last, self.metrics.smoothed))

    def format_goodput(self) -> str:
        """Say where the time of the run has gone so far."""
        return " · ".join(describe_goodput(self.metrics.last))

    def list_metrics(self) -> list[MetricRow]:
        """Return the metrics of the newest step, by name."""
        previous, first, last = self.metrics.previous, self.metrics.first, self.metrics.last
        return [
            MetricRow(name, format_metric(last, name), _format(previous.get(name)), format_number(first[name]))
            for name in sorted(last)
        ]

    def list_plots(self) -> list[tuple[CurvePlot, dict[str, Curve]]]:
        """Return the pictures that the run has metrics for, with their curves."""
        return [(plot, chosen) for plot in PLOTS if (chosen := choose_curves(plot, self.metrics.curves))]

    def find_samples(self, text: str = "") -> Iterator[dict[str, Any]]:
        """Yield the samples whose prompt, response or heading holds ``text``, in capitals or not; the newest first."""
        wanted = text.casefold()
        for sample in reversed(self.samples.values):
            shown = (describe_sample(sample), str(sample.get("prompt")), str(sample.get("response")))
            if any(wanted in candidate.casefold() for candidate in shown):
                yield sample


def describe_sample(sample: Mapping[str, Any]) -> str:
    """Return the heading of a sample: where it comes from, its reward, and how it ended."""
    reward = sample.get("reward")
    fields = [
        f"step {sample.get('step')}",
        str(sample.get("phase", "")),
        f"{name_group(sample.get('group'))}, sample {sample.get('index')}",
        f"reward {_format(reward)}" if isinstance(reward, int | float) else "no reward",
        str(sample.get("status", "")),
    ]
    return " · ".join(filter(None, fields))


def _format(value: float | None) -> str:
    return "" if value is None else format_number(value)
