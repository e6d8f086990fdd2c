"""The results of a sweep: the best trial, a table, a CSV file, and pictures."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from coalign.report.display import Display
from coalign.report.plots import NEEDS_MATPLOTLIB, can_plot
from coalign.report.step_line import format_number
from coalign.run_files.records import read_records
from coalign_jobs.sweep.config import SweepConfig
from coalign_jobs.sweep.pictures import plot_settings, plot_trials
from coalign_jobs.sweep.space import format_setting
from coalign_jobs.sweep.state import SweepState, SweepTrial

COLORS = {"finished": "green", "stopped": "yellow", "failed": "red", "waiting": "dim", "running": "dim"}


def find_best(trials: Sequence[SweepTrial], mode: str) -> SweepTrial | None:
    """Return the trial with the best last value, of those that have one and did not fail; None without any."""
    measured = [trial for trial in trials if trial.value is not None and trial.status in ("finished", "stopped")]
    sign = 1 if mode == "max" else -1
    return max(measured, key=lambda trial: sign * (trial.value or 0.0), default=None)


def show_results(config: SweepConfig, state: SweepState, display: Display) -> None:
    """Print the table, write results.csv and the pictures, and name the best trial with its model."""
    best = find_best(state.trials, config.mode)
    display.show(draw_table(config, state.trials, best))
    write_csv(state.folder / "results.csv", config, state.trials)
    for trial in state.trials:
        if trial.status == "failed":
            display.show(f"{trial.name} failed: {trial.error}")
    if best is None:
        display.show(f"no trial has a value of {config.metric}")
        return
    settings = ", ".join(f"{key}={format_setting(value)}" for key, value in best.settings.items())
    display.show(f"best: {best.name}, {config.metric} {format_number(best.value or 0.0)} at step {best.step}")
    display.show(f"      {settings}")
    model = state.folder / best.name / "model"
    if model.exists():
        display.show(f"      model: {model}")
    display.show(f"table: {state.folder}/results.csv; {draw_pictures(config, state, best)}")


def draw_pictures(config: SweepConfig, state: SweepState, best: SweepTrial) -> str:
    """Draw curves.png and settings.png; return a line that names them, or says why there are none."""
    if not can_plot():
        return f"no pictures: {NEEDS_MATPLOTLIB}"
    curves = {trial.name: read_curve(state.folder / trial.name, config.metric) for trial in state.trials}
    picture = plot_trials(curves, config.metric, best.name, state.folder / "curves.png")
    points = {
        key: [(trial.settings[key], trial.value) for trial in state.trials if trial.value is not None]
        for key in config.space
    }
    plot_settings(points, config.metric, state.folder / "settings.png")
    return f"pictures: {picture.name}, settings.png"


def draw_table(config: SweepConfig, trials: Sequence[SweepTrial], best: SweepTrial | None) -> Table:
    """Draw a row for each trial, the best first, those without a value last."""
    table = Table(box=None, pad_edge=False)
    for column in ("trial", "status"):
        table.add_column(column)
    for column in ("step", config.metric, *(key.rpartition(".")[2] for key in config.space), "seconds"):
        table.add_column(column, justify="right", overflow="fold")
    for trial in sort_trials(trials, config.mode):
        mark = "*" if trial is best else ""
        value = "" if trial.value is None else format_number(trial.value)
        settings = [format_setting(trial.settings[key]) for key in config.space]
        status = Text(trial.status, style=COLORS[trial.status])
        table.add_row(f"{trial.number:03d}{mark}", status, str(trial.step), value, *settings, f"{trial.seconds:.0f}")
    return table


def sort_trials(trials: Sequence[SweepTrial], mode: str) -> list[SweepTrial]:
    sign = -1 if mode == "max" else 1
    return sorted(trials, key=lambda trial: math.inf if trial.value is None else sign * trial.value)


def write_csv(path: Path, config: SweepConfig, trials: Sequence[SweepTrial]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(["trial", "status", "step", config.metric, *config.space, "seconds", "error"])
        for trial in trials:
            settings = [trial.settings[key] for key in config.space]
            value = "" if trial.value is None else trial.value
            rows.writerow(
                [trial.name, trial.status, trial.step, value, *settings, round(trial.seconds, 1), trial.error]
            )


def read_curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Read the values of a metric from the metrics.jsonl of a run, by step."""
    records = read_records(folder / "metrics.jsonl")
    return [(row["step"], row[metric]) for row in records if isinstance(row.get(metric), int | float)]
