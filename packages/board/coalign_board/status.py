"""Says how a run is doing: its state, which the run writes itself, its newest metrics, and the pages that it fills."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coalign.report.step_line import format_fields, format_goodput, format_idle, format_seconds
from coalign.run_files.lock import read_owner
from coalign.run_files.records import parse_record, read_end, select_numbers
from coalign.run_files.state import RunState, read_state
from coalign_board.catalog import find_within
from coalign_board.curves import round_value
from coalign_board.readers.checkpoints import has_checkpoints

_END_BYTES = 1 << 16  # read from the end of a file
_NUMBERS = ("reward/mean", "eval/mean", "loss/value", "eval/loss/value", "loss/accuracy", "eval/loss/accuracy")


class RunSummaries:
    """Summaries of runs; what was read from files that have not changed since is used again."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[Any, dict[str, Any]]] = {}  # folder -> size and time of its metrics, what they say

    def summarise(self, folder: Path) -> dict[str, Any]:
        """Return status, steps, newest numbers and times of a run, and `growth`, which changes whenever a file does."""
        growth = _measure(folder)
        if folder not in self._kept or self._kept[folder][0] != growth.get("metrics.jsonl"):
            self._kept[folder] = growth.get("metrics.jsonl"), _read_metrics(folder)
        newest = self._kept[folder][1]
        state, owner = read_state(folder), read_owner(folder)
        going = state.status in ("running", "stalled")
        # Without its fractions it is a number that JavaScript can hold.
        token = hash((going, *sorted(growth.items()))) & 0xFFFFFFFFFFFF
        updated = max((growth[name][1] for name in ("metrics.jsonl", "log.txt") if name in growth), default=None)
        return {
            "status": state.status,
            "why": state.reason,
            "step": newest["step"],
            "last": state.steps,
            "numbers": newest["numbers"],
            "line": newest["line"],
            "seconds": newest["seconds"],
            "algorithm": state.algorithm,
            "started": owner.started if owner else None,
            "host": owner.host if owner else None,
            "pid": owner.pid if owner and going else None,
            "updated": None if updated is None else updated / 1e9,
            "now": time.time(),
            "growth": token,
            "pages": list(_list_pages(folder, growth, state, newest)),
        }


def _list_pages(
    folder: Path, growth: Mapping[str, tuple[int, int]], state: RunState, newest: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the pages of the run that have something to show, in the order of their tabs.

    A run that is going will have curves; one that ended before its first step has none.
    """
    has_steps = newest["step"] is not None
    has = {name for name, (size, _) in growth.items() if size}
    shown = {
        "cause": state.status == "failed",
        "overview": has_steps or state.status in ("running", "stalled"),
        "rollouts": "samples.jsonl" in has,
        "timeline": has_steps or "timeline" in has,
        "placement": "placement.json" in has,
        "checkpoints": has_checkpoints(folder),
        "goodput": newest["has_goodput"],
        "flow": "flow.json" in has,
        "log": "log.txt" in has or "stalls" in has,
        "configuration": "config.yaml" in has,
    }
    return (name for name, is_shown in shown.items() if is_shown)


def _read_metrics(folder: Path) -> dict[str, Any]:
    """Return what the newest metrics say; those of an evaluation may be some lines above the end."""
    try:
        end = read_end(find_within(folder, folder / "metrics.jsonl"), _END_BYTES)
    except (OSError, ValueError):  # it cannot be read, or leads out of the folder
        end = b""
    records = [record for line in end.split(b"\n") if (record := parse_record(line))]
    numbers: dict[str, float | None] = {}
    for record in records:
        numbers |= {name: round_value(value) for name, value in select_numbers(record).items() if name in _NUMBERS}
    newest = select_numbers(records[-1]) if records else {}
    return {
        "step": int(newest["step"]) if newest else None,
        "numbers": numbers,
        "line": _format_line(newest),
        "seconds": newest.get("time/run"),
        "has_goodput": any(name.startswith("goodput/") for name in newest),
    }


def _format_line(newest: Mapping[str, float]) -> str:
    """Return the newest step's line, as the terminal shows it."""
    fields = (*format_fields(newest, {}), format_seconds(newest), format_goodput(newest), format_idle(newest))
    return " │ ".join(field for field in fields if field)


def _measure(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file and folder in the run's folder."""
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                stat = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            sizes[entry.name] = (stat.st_size, stat.st_mtime_ns)
    return sizes
