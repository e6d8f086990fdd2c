"""Asks `coalign diagnose` why a run failed, once for each state of its log."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from coalign_board.catalog import find_within

_MAX_RUNS = 16  # runs whose causes are kept
_MAX_SECONDS = 60  # enough for logs of a gigabyte
_LOGS = ("*.txt", "*.log", "*.out", "*.err", "stalls/*/*.txt")  # what `coalign diagnose` may read of a run's folder


class CauseReader:
    """Reads causes in a process of their own: a diagnosis needs more memory than all the rest of the board."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[Any, dict[str, Any]]] = OrderedDict()
        self._lock = Lock()  # one diagnosis at a time

    def read(self, folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the answer of `coalign diagnose --json` (coalign_diagnose.report); `cause` is null if it finds none.

        ValueError for logs that lead out of the folder, or that it cannot read.
        """
        files = [find_within(folder, file) for pattern in _LOGS for file in sorted(folder.glob(pattern))]
        state = [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        if not any(size for _, size, _ in state):
            return {"cause": None, "files": 0, "survived_errors": 0}
        with self._lock:
            if folder not in self._kept or self._kept[folder][0] != state:
                self._kept[folder] = state, _diagnose(folder)
            self._kept.move_to_end(folder)
            while len(self._kept) > _MAX_RUNS:
                self._kept.popitem(last=False)
            return self._kept[folder][1]


def _diagnose(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "coalign_diagnose", str(folder.resolve()), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the diagnosis took more than {_MAX_SECONDS} s; run `coalign diagnose` on the folder"
        ) from None
    if not done.stdout:  # the exit code is 1, too, where the logs hold no cause that it knows
        raise ValueError(f"coalign diagnose: {done.stderr.strip()[-300:]}")
    verdict = json.loads(done.stdout)
    for evidence in verdict.get("evidence", ()):
        evidence["place"] = evidence["place"].removeprefix(f"{folder.resolve()}/")
    return verdict
