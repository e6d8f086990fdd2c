"""Says from the ends of its files how a run is doing: running, stalled, ended or failed, and its newest step."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coalign.files import open_regular
from coalign.report.step_line import format_fields, format_goodput, format_idle, format_seconds
from coalign.run_files.lock import is_going, read_owner
from coalign.run_files.records import parse_record, read_end, select_numbers
from coalign_board.catalog import find_within
from coalign_board.curves import round_value
from coalign_board.readers.checkpoints import has_checkpoints

_END_BYTES = 1 << 16  # read from the end of a file
_STEP = re.compile(rb"^[^\n]*? step +(\d+)/(\d+)(?: |$)", re.MULTILINE)
_ENTRY = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ ", re.MULTILINE)
_ERROR = b"the run ended with an error"
_GUARDED = re.compile(rb"^[^\n]* ERROR coalign\.engine\.hooks\.guards: stopping: ([^\n]*)", re.MULTILINE)
_STOPPED = re.compile(rb" WARNING [\w.]+: (SIG[A-Z]+): ")
_ORDERLY = re.compile(rb"^[^\n]* (?:goodput: \d+%|the rest of the time: |of the generated tokens )", re.MULTILINE)
_NUMBERS = ("reward/mean", "eval/mean", "loss/value", "eval/loss/value", "loss/accuracy", "eval/loss/accuracy")
_COPIES = re.compile(r"^  save_copies_to: (?!null)", re.MULTILINE)
_TEXT = re.compile(r"^(algorithm|seed): *(.*)$", re.MULTILINE)


class RunSummaries:
    """Summaries of runs; what was read from files that have not changed since is used again."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[Any, dict[str, Any]]] = {}

    def summarise(self, folder: Path) -> dict[str, Any]:
        """Return status, steps, newest numbers and times of a run, and `growth`, which changes whenever a file does."""
        growth = _measure(folder)
        key = tuple(growth.get(name) for name in ("metrics.jsonl", "log.txt", "config.yaml", "stalls"))
        if folder not in self._kept or self._kept[folder][0] != key:
            self._kept[folder] = key, _read_ends(folder)
        going = is_going(folder)
        ends = self._kept[folder][1]
        status, why = (
            ends["ending"] if not going else ("stalled", ends["stall"]) if ends["stall"] else ("running", None)
        )
        owner = read_owner(folder)
        # Without its fractions it is a number that JavaScript can hold.
        token = hash((going, *sorted(growth.items()))) & 0xFFFFFFFFFFFF
        updated = max((growth[name][1] for name in ("metrics.jsonl", "log.txt") if name in growth), default=None)
        return {
            "status": status,
            "why": why,
            "step": ends["step"],
            "last": ends["last"],
            "numbers": ends["numbers"],
            "line": ends["line"],
            "seconds": ends["seconds"],
            "algorithm": ends["algorithm"],
            "started": owner.started if owner else None,
            "host": owner.host if owner else None,
            "pid": owner.pid if owner and going else None,
            "updated": None if updated is None else updated / 1e9,
            "now": time.time(),
            "growth": token,
            "pages": list(_list_pages(folder, growth, status, ends)),
        }


def _list_pages(
    folder: Path, growth: Mapping[str, tuple[int, int]], status: str, ends: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the pages of the run that have something to show, in the order of their tabs.

    A run that is going will have curves; one that ended before its first step has none.
    """
    has_steps = ends["step"] is not None
    has = {name for name, (size, _) in growth.items() if size}
    shown = {
        "cause": status == "failed",
        "overview": has_steps or status in ("running", "stalled"),
        "rollouts": "samples.jsonl" in has,
        "timeline": has_steps or "timeline" in has,
        "placement": "placement.json" in has,
        "checkpoints": ends["has_copies"] or has_checkpoints(folder),
        "goodput": ends["has_goodput"],
        "flow": "flow.json" in has,
        "log": "log.txt" in has or "stalls" in has,
        "configuration": "config.yaml" in has,
    }
    return (name for name, is_shown in shown.items() if is_shown)


def _read_ends(folder: Path) -> dict[str, Any]:
    log = _read_end(folder, "log.txt")
    metrics = _read_end(folder, "metrics.jsonl")
    records = [record for line in metrics.split(b"\n") if (record := parse_record(line))]
    numbers: dict[str, float | None] = {}
    for record in records:
        numbers |= {name: round_value(value) for name, value in select_numbers(record).items() if name in _NUMBERS}
    newest = select_numbers(records[-1]) if records else {}
    step = int(newest["step"]) if newest else None
    lines = list(_STEP.finditer(log))
    last = int(lines[-1][2]) if lines else None
    config = _read_start(folder, "config.yaml").decode(errors="replace")
    settings = dict(_TEXT.findall(config))
    return {
        "step": step,
        "last": last,
        "numbers": numbers,
        "line": _format_line(newest),
        "seconds": newest.get("time/run"),
        "has_copies": _COPIES.search(config) is not None,
        "has_goodput": any(name.startswith("goodput/") for name in newest),
        "algorithm": settings.get("algorithm", "").strip("'\""),
        "stall": _find_stall(folder),
        "ending": _find_ending(log[lines[-1].start() :] if lines else log, step, last),
    }


def _format_line(newest: Mapping[str, float]) -> str:
    """Return the newest step's line, as the terminal shows it."""
    fields = (*format_fields(newest, {}), format_seconds(newest), format_goodput(newest), format_idle(newest))
    return " │ ".join(field for field in fields if field)


def _find_ending(log: bytes, step: int | None, last: int | None) -> tuple[str, str | None]:
    """Return how a run ended that is not going, from its log since the last step's line."""
    if _ERROR in log:
        return "failed", _last_line(log[log.rfind(_ERROR) :])
    if guarded := list(_GUARDED.finditer(log)):
        return "failed", guarded[-1][1].decode(errors="replace")
    if step is not None and step == last:
        return "ended", None
    if stopped := list(_STOPPED.finditer(log)):
        return "ended", stopped[-1][1].decode()
    if _ORDERLY.search(log):
        return "ended", None
    return "failed", None  # killed: it had no time to say why


def _last_line(entry: bytes) -> str:
    """Return the error of a traceback: the last line that begins with the name of one."""
    after = _ENTRY.split(entry)[0]
    lines = [line for line in after.decode(errors="replace").splitlines() if line and not line.startswith((" ", "\t"))]
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(?:: |$)", line)]
    return (errors or lines or [""])[-1][:300]


def _find_stall(folder: Path) -> str | None:
    """Return the reason in the newest report of the watchdog, if the run has not come to another step since."""
    try:
        newest = max((folder / "stalls").iterdir(), key=lambda path: path.name, default=None)
        if newest is None:
            return None
        report = find_within(folder, newest / "report.txt")
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_mtime_ns > report.stat().st_mtime_ns:
            return None
        with open_regular(report) as file:
            reason = file.read(_END_BYTES).decode(errors="replace").partition("\n")[0]
    except (OSError, ValueError):
        return None
    return None if reason.startswith("asked for") else reason[:300]


def _read_end(folder: Path, name: str) -> bytes:
    """Return the end of a file of the run; empty if it cannot be read or leads out of the folder."""
    try:
        return read_end(find_within(folder, folder / name), _END_BYTES)
    except (OSError, ValueError):
        return b""


def _read_start(folder: Path, name: str) -> bytes:
    try:
        with open_regular(find_within(folder, folder / name)) as file:
            return file.read(4096)
    except (OSError, ValueError):
        return b""


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
