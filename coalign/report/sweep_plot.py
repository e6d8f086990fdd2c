"""Draws a sweep: the curve of every trial, and the value that each setting has led to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.report.plots import Curve, new_figure, open_figure, pick_colors, save_figure

MOST_NAMES = 16  # in a legend


def plot_curves(curves: Mapping[str, Curve], metric: str, best: str, path: Path) -> Path:
    """Draw a metric over the steps of each trial, that of the ``best`` one strongly."""
    figure, axes = new_figure("Trials", metric)
    shown = {name: curve for name, curve in curves.items() if curve}
    colors = pick_colors(16)
    for number, (name, curve) in enumerate(shown.items()):
        steps, values = zip(*curve, strict=True)
        strong = name == best
        axes.plot(
            steps,
            values,
            color=colors[number % len(colors)],
            linewidth=2.4 if strong else 1.0,
            alpha=1.0 if strong else 0.6,
            marker="o" if len(steps) < 30 else None,
            markersize=3.5,
            label=f"{name} (best)" if strong else name,
        )
    if len(shown) <= MOST_NAMES:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, path)


def plot_settings(points: Mapping[str, Sequence[tuple[Any, float]]], metric: str, path: Path) -> Path:
    """Draw, for each setting, the last value of each trial over what it was set to. Other values than numbers are
    names on the axis; a setting over more than a factor of 30 has a logarithmic one."""
    figure = open_figure(4.2 * len(points), 3.6, layout="constrained")
    for number, (key, pairs) in enumerate(points.items()):
        axes = figure.add_subplot(1, len(points), number + 1)
        settings, values = [setting for setting, _ in pairs], [value for _, value in pairs]
        numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in settings)
        axes.scatter(settings if numeric else list(map(str, settings)), values, color=pick_colors(1)[0], s=22)
        if numeric and settings and min(settings) > 0 and max(settings) > 30 * min(settings):
            axes.set_xscale("log")
        axes.set_title(key, loc="left", fontsize=9)
        axes.set_ylabel(metric)
        axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)
