"""Draws a run: curves from its metrics.jsonl, and the timeline of a step, with a row for each replica or rank.

Of a sweep it draws the curve of every trial, and the value that each setting has led to.

A metric that a run does not report costs only its own picture. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.report.step_line import split_step_seconds
from coalign.run_files.records import read_records, select_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The first eight are strong; from then on the same hues are paler.
_COLORS = (
    *("#3366cc", "#dd8833", "#2a9d6f", "#b04a8f", "#6b5bb0", "#8a8a3c", "#c0504d", "#4aa3a3"),
    *("#9db4e8", "#f2c79b", "#9bd6bd", "#dfa9cb", "#b9b0e0", "#c9c98f", "#e5a9a7", "#a8d6d6"),
)


NEEDS_MATPLOTLIB = "matplotlib draws pictures, and is not installed: pip install 'coalign[plots]'"


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def open_figure(width: float, height: float, **settings: Any) -> Figure:
    """Return an empty figure of ``width`` and ``height`` inches. Raises ImportError without matplotlib."""
    if not can_plot():
        raise ImportError(NEEDS_MATPLOTLIB)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **settings)  # not pyplot: no global state, no display needed
    FigureCanvasAgg(figure)
    return figure


def new_figure(title: str, unit: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """Return a figure of ``height`` inches and its axes, in the style of all pictures."""
    figure = open_figure(7.5, height)
    return figure, style_axes(figure.add_subplot(), title, unit)


def style_axes(axes: Axes, title: str, unit: str, size: int = 12) -> Axes:
    """Give axes over steps the style of all pictures; ``size`` is the title's, in points. Returns them."""
    from matplotlib.ticker import MaxNLocator  # there, as open_figure has found

    axes.set_title(title, loc="left", fontsize=size, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(format_tick)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    return axes


def format_tick(value: float, _: float = 0.0) -> str:
    """Write a number of an axis without a common exponent (`1e-6`), which would overlap the title."""
    return f"{value:.10g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def save_figure(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    return path


def pick_colors(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]


Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class CurvePlot:
    """One picture: the metrics it shows (fnmatch patterns) and its axis."""

    file: str
    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    from_zero: bool = False


PLOTS = (
    CurvePlot("reward", "Reward", ("reward/mean", "reward/*/mean")),
    CurvePlot("eval", "Evaluation", ("eval/mean", "eval/pass@*")),
    CurvePlot("accuracy", "Accuracy", ("loss/accuracy", "eval/loss/accuracy"), "share"),
    CurvePlot("loss", "Loss", ("loss/value",)),
    CurvePlot("eval_loss", "Loss of the evaluation data", ("eval/loss/value",)),
    CurvePlot("nll", "Negative log-likelihood", ("loss/nll", "eval/loss/nll"), "nats per token"),
    CurvePlot("kl", "Divergence from the reference", ("loss/kl_ref", "kl_per_token"), "nats per token"),
    CurvePlot("entropy", "Entropy", ("loss/entropy",), "nats per token"),
    CurvePlot(
        "mismatch", "Trainer against sampler", ("loss/mismatch", "loss/mismatch_kl"), "nats per token", from_zero=True
    ),
    CurvePlot("ess", "Effective sample size of the importance weights", ("loss/ess",), from_zero=True),
    CurvePlot("grad_norm", "Gradient norm", ("loss/grad_norm",), from_zero=True),
    CurvePlot("length", "Response length", ("tokens/response", "tokens/response_max"), "tokens", from_zero=True),
    CurvePlot("throughput", "Throughput", ("throughput/generated", "throughput/trained"), "tokens per second", True),
    CurvePlot("samples", "Samples trained on", ("throughput/samples",), "per second", from_zero=True),
    CurvePlot("memory", "Peak memory", ("memory/*",), "MiB", from_zero=True),
)


def plot_run(run_dir: str | Path) -> list[Path]:
    """Draw the run's metrics.jsonl and its newest timeline into plots/*.png; return the files.

    Without logged steps nothing is drawn.
    """
    rows = list(read_records(Path(run_dir) / "metrics.jsonl"))
    if not rows:
        return []
    folder = Path(run_dir) / "plots"
    folder.mkdir(exist_ok=True)
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, value in select_numbers(row).items():
            curves.setdefault(name, []).append((row["step"], value))
    written = [_draw_curves(folder, plot, chosen) for plot in PLOTS if (chosen := choose_curves(plot, curves))]
    phases = {
        row["step"]: split_step_seconds(select_numbers(row)) for row in rows if "time/step" in select_numbers(row)
    }
    if phases:
        figure, axes = _draw_bands("Time of a step", "seconds", phases)
        axes.plot(*zip(*curves["time/step"], strict=True), color="#222222", linewidth=1.2, label="whole step")
        written.append(_save_bands(figure, axes, folder / "time.png"))
    shares = {
        row["step"]: {n.removeprefix("goodput/"): row[n] for n in select_numbers(row) if n.startswith("goodput/")}
        for row in rows
        if "goodput/trained" in row
    }
    if shares:
        figure, axes = _draw_bands("Where the time went", "share of the run so far", shares)
        axes.set_ylim(top=1)
        written.append(_save_bands(figure, axes, folder / "goodput.png"))
    trace = find_newest_timeline(Path(run_dir))
    return written if trace is None else [*written, plot_timeline(trace, folder / "timeline.png")]


def find_newest_timeline(run: Path) -> Path | None:
    """Return the newest timeline of a run folder (`runtime.timeline_every`); None without one."""
    return max((run / "timeline").glob("step_*.json"), key=lambda file: file.stat().st_mtime, default=None)


def choose_curves(plot: CurvePlot, curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves of a picture in the order of its patterns.

    Of equal curves (those of a single reward function, say) the first one stays.
    """
    chosen: dict[str, Curve] = {}
    for pattern in plot.metrics:
        for name in fnmatch.filter(curves, pattern):
            if curves[name] not in chosen.values():
                chosen[name] = curves[name]
    return chosen


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value with up to ``reach`` neighbours on both sides."""
    sums = [0.0, *accumulate(values)]
    spans = [(max(i - reach, 0), min(i + reach + 1, len(values))) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]


def _draw_curves(folder: Path, plot: CurvePlot, curves: Mapping[str, Curve]) -> Path:
    figure, axes = new_figure(plot.title, plot.unit)
    for (name, curve), color in zip(curves.items(), pick_colors(len(curves)), strict=True):
        steps, values = zip(*curve, strict=True)
        label = name.removeprefix("loss/")
        if len(values) < 30:
            axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
        else:  # noise behind, trend in front
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(values, len(values) // 25), color=color, linewidth=2.0, label=label)
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, folder / f"{plot.file}.png")


def _draw_bands(title: str, unit: str, rows: Mapping[int, Mapping[str, float]]) -> tuple[Figure, Axes]:
    """Draw numbers of each step on top of each other."""
    figure, axes = new_figure(title, unit)
    steps = list(rows)
    names = list(dict.fromkeys(name for numbers in rows.values() for name in numbers))
    bands = [[rows[step].get(name, 0.0) for step in steps] for name in names]
    if names:
        axes.stackplot(steps, bands, labels=names, colors=pick_colors(len(names)), alpha=0.75, linewidth=0)
    return figure, axes


def _save_bands(figure: Figure, axes: Axes, path: Path) -> Path:
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, path)


_ROW = 0.32  # inches


def plot_timeline(trace: Path, picture: Path) -> Path:
    """Draw a trace of coalign.engine.hooks.timeline; return ``picture``. Waiting is a thin line before a call's bar."""
    events = json.loads(trace.read_text())["traceEvents"]
    rows = _timeline_rows(events)
    names = list(dict.fromkeys(event["name"] for event in events if event["ph"] == "X"))
    colors = dict(zip(names, pick_colors(len(names)), strict=True))
    figure, axes = new_figure(f"Timeline of {trace.stem.replace('_', ' ')}", "", height=1.2 + _ROW * len(rows))
    from matplotlib.ticker import AutoLocator  # there, as new_figure has found

    for name in names:
        bars = [event for event in events if event["ph"] == "X" and event["name"] == name]
        axes.barh(
            [rows[_key(bar)][0] for bar in bars],
            [bar["dur"] / 1e6 for bar in bars],
            left=[bar["ts"] / 1e6 for bar in bars],
            height=0.7,
            color=colors[name],
            label=name,
        )
    starts = {event["id"]: event for event in events if event["ph"] == "b"}
    for event in events:
        if event["ph"] == "e":
            row = [rows[_key(event)][0]] * 2
            span = [starts[event["id"]]["ts"] / 1e6, event["ts"] / 1e6]
            axes.plot(span, row, color="#999999", linewidth=0.9, zorder=0)
    axes.set_yticks([row for row, _ in rows.values()], [text for _, text in rows.values()])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.xaxis.set_major_locator(AutoLocator())
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, picture)


def _timeline_rows(events: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], tuple[int, str]]:
    """Return (model, process) -> (position from above, text), with the processes of a model next to each other."""
    models = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {_key(event): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    text = {key: models[key[0]] + ("" if name == models[key[0]] else f", {name}") for key, name in threads.items()}
    return {key: (position, text[key]) for position, key in enumerate(sorted(text))}


def _key(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]
