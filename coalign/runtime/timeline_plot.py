"""The trace of a step as a picture: a row for each replica or rank, what it computed, and what waited for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.runtime.drawing import cycle, figure, save

_ROW = 0.32  # inches


def plot_timeline(trace: Path, picture: Path) -> Path:
    """Draw what coalign.runtime.timeline wrote; returns ``picture``. Waiting is a thin line before a call's bar."""
    from matplotlib.ticker import AutoLocator

    events = json.loads(trace.read_text())["traceEvents"]
    rows = _rows(events)
    names = list(dict.fromkeys(event["name"] for event in events if event["ph"] == "X"))
    colors = dict(zip(names, cycle(len(names)), strict=True))
    fig, axes = figure(f"Timeline of {trace.stem.replace('_', ' ')}", "", height=1.2 + _ROW * len(rows))
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
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    for event in events:
        if event["ph"] == "e":
            at = [rows[_key(event)][0]] * 2
            axes.plot([begun[event["id"]]["ts"] / 1e6, event["ts"] / 1e6], at, color="#999999", linewidth=0.9, zorder=0)
    axes.set_yticks([at for at, _ in rows.values()], [text for _, text in rows.values()])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.xaxis.set_major_locator(AutoLocator())
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save(fig, picture)


def _rows(events: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], tuple[int, str]]:
    """(model, process) -> (position from above, text), models together."""
    models = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {_key(event): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    text = {key: models[key[0]] + ("" if name == models[key[0]] else f", {name}") for key, name in threads.items()}
    return {key: (at, text[key]) for at, key in enumerate(sorted(text))}


def _key(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]
