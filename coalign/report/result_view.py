"""Shows a finished run in a notebook or at a prompt: one line, and the curve of its main metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from coalign.report.step_line import format_number

_SHOWN = ("eval/mean", "reward/mean", "eval/loss/accuracy", "loss/accuracy", "loss/value")  # the first that a run has
_WIDTH, _HEIGHT = 360, 90  # pixels


def describe_metrics(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the steps of a run, and its main metric at first and at last: `20 steps, reward/mean 0.410 → 0.830`."""
    steps = max((row["step"] for row in metrics), default=0)
    name, points = _select_curve(metrics)
    change = f", {name} {format_number(points[0][1])} → {format_number(points[-1][1])}" if points else ""
    return f"{steps} steps{change}"


def draw_curve(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Draw the main metric of a run over its steps as SVG; empty where it has no two points."""
    name, points = _select_curve(metrics)
    if len(points) < 2:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    across, up = _WIDTH / (steps[-1] - steps[0] or 1), _HEIGHT / (high - low or 1)
    line = " ".join(f"{(step - steps[0]) * across:.1f},{_HEIGHT - (value - low) * up:.1f}" for step, value in points)
    label = f"{escape(name)}: {format_number(low)} to {format_number(high)}, steps {steps[0]} to {steps[-1]}"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 24}" role="img"><title>{label}</title>'
        f'<polyline points="{line}" fill="none" stroke="#4477aa" stroke-width="1.5"/>'
        f'<text x="0" y="{_HEIGHT + 18}" font-size="12" fill="currentColor">{label}</text></svg>'
    )


def _select_curve(metrics: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, float]]]:
    """Select the first of the main metrics that the run has: its name, and (step, value) where it is a number."""
    for name in _SHOWN:
        points = [(row["step"], float(row[name])) for row in metrics if isinstance(row.get(name), int | float)]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        if points:
            return name, points
    return "", []
