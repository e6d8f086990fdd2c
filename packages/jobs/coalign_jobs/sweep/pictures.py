"""Draws the trials of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.report.plots import Curve, format_tick, new_figure, open_figure, pick_colors, save_figure

_MAX_LEGEND_NAMES = 16


def plot_trials(curves: Mapping[str, Curve], metric: str, best: str, path: Path) -> Path:
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
    if len(shown) <= _MAX_LEGEND_NAMES:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, path)


def plot_settings(points: Mapping[str, Sequence[tuple[Any, float]]], metric: str, path: Path) -> Path:
    """Draw, for each setting, the last metric of each trial over the setting's value, as a number or as a name.

    A range of more than a factor of 30 has a logarithmic axis."""
    figure = open_figure(4.2 * len(points), 3.6, layout="constrained")
    for number, (key, pairs) in enumerate(points.items()):
        axes = figure.add_subplot(1, len(points), number + 1)
        settings, values = [setting for setting, _ in pairs], [value for _, value in pairs]
        numeric = all(type(entry) in (int, float) for entry in settings)
        axes.scatter(settings if numeric else list(map(str, settings)), values, color=pick_colors(1)[0], s=22)
        axes.yaxis.set_major_formatter(format_tick)
        if numeric and settings and min(settings) > 0 and max(settings) > 30 * min(settings):
            axes.set_xscale("log")
        elif numeric:
            axes.xaxis.set_major_formatter(format_tick)
        axes.set_title(key, loc="left", fontsize=9)
        axes.set_ylabel(metric)
        axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)
