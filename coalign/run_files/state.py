"""state.json of a run folder: how the run is doing, as its loop says it.

The loop writes it when the run begins, after each step, when the watchdog reports a stall, and at the end. A killed
process cannot: its last status stays, and the lock of the folder, which nobody holds any more, tells.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from coalign.files import Sink, read_json_object, write_text_atomically
from coalign.run_files.lock import is_going

NAME = "state.json"
Status = Literal["running", "stalled", "ended", "failed"]
_MAX_BYTES = 64 * 1024
_MAX_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run is doing: the newest of its ``steps``, and the ``reason`` of a stall, an early end or a failure.

    ``step`` and ``steps`` are None before the loop begins.
    """

    status: Status
    algorithm: str = ""
    step: int | None = None
    steps: int | None = None
    reason: str | None = None


class StateFile:
    """Writes the state of a run, from any thread. One that cannot be written is logged, and the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._sink = Sink(str(self._path))
        self._state = RunState("running")
        self._lock = threading.Lock()

    def note(self, status: Status, **changes: Any) -> None:
        """Write a status and what else has changed. The reason of an earlier status does not stay.

        A run that has ended does not stall: the watchdog may still look while plots are drawn.
        """
        with self._lock:
            if status == "stalled" and self._state.status not in ("running", "stalled"):
                return
            self._state = replace(self._state, **{"reason": None, **changes, "status": status})
            with self._sink.survive():
                write_text_atomically(self._path, json.dumps(asdict(self._state)))


def read_state(folder: Path) -> RunState:
    """Read how a run is doing. A run that was killed has failed, without a reason.

    A folder whose state is missing or damaged is of an older version: it has ended, as far as can be told.
    """
    going = is_going(folder)  # first: a run that ends meanwhile has written how before it lets go of its lock
    state = _read_file(folder / NAME)
    if going:
        return state if state.status in ("running", "stalled") else replace(state, status="running", reason=None)
    return state if state.status in ("ended", "failed") else replace(state, status="failed", reason=None)


def _read_file(path: Path) -> RunState:
    try:
        content = read_json_object(path, _MAX_BYTES)
    except (OSError, ValueError):
        return RunState("ended", reason=f"there is no {NAME} that says more")
    checked = {name: content[name] for name in _CHECKS if _CHECKS[name](content.get(name))}
    if isinstance(reason := content.get("reason"), str):
        checked["reason"] = reason[:_MAX_REASON]
    return RunState(**{"status": "ended", **checked})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53  # the integers that JavaScript counts exactly


_CHECKS = {
    "status": lambda value: value in get_args(Status),
    "algorithm": lambda value: isinstance(value, str),
    "step": _is_count,
    "steps": _is_count,
}
