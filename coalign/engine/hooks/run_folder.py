"""The files of a run: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/, plots/, log.txt. Their names are stable.

Lines are appended whole and flushed. A full disk does not stop a run: lines wait in memory and are written with the
next. Only one run at a time may write to a folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from coalign.files import move_aside, write_atomically
from coalign.types import Metric

log = logging.getLogger(__name__)


class FolderInUse(OSError):
    """Another process is writing to this file or run folder."""


class StepLog:
    """A file of one JSON object a line, each with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def cut(self, step: int) -> None:
        """Remove lines of later steps (they will be made again) and a line cut in half by a crash."""
        if not self.path.exists():
            return
        # Bytes, because a crash may cut a character, and because text may hold separators that JSON does not escape.
        with open(self.path, "rb") as lines, write_atomically(self.path) as aside, open(aside, "wb") as out:
            for line in lines:
                try:
                    if json.loads(line)["step"] <= step:
                        out.write(line.rstrip(b"\n") + b"\n")
                except (ValueError, KeyError):
                    break

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self._waiting.append((json.dumps(replace_non_finite(record), ensure_ascii=False) + "\n").encode())
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab") as out:
                out.write(b"".join(self._waiting))
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.truncate(self.path, size)
            log.warning("%s: %s; %d lines wait in memory", self.path, problem.strerror, len(self._waiting))
        else:
            self._waiting.clear()


def lock_file(path: Path, message: str) -> IO[bytes]:
    """Open a file, made if needed, and hold its lock until it is closed. Raises FolderInUse(message) if it is locked.

    The file is open for reading and appending.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FolderInUse(message) from None
    return file


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder and hold its lock until the returned file is closed. Raises FolderInUse."""
    return lock_file(folder / ".lock", f"{folder} belongs to a run that is still going; choose another `output`")


class RunFolder:
    """Creates and locks the folder of a run. Raises FolderInUse, and OSError where it cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = lock_folder(self.path)
        self.metrics = StepLog(self.path / "metrics.jsonl")
        self.samples = StepLog(self.path / "samples.jsonl")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def move_records_aside(self) -> None:
        """Rename the checkpoints and logs of an earlier run, for a run that does not resume from them."""
        for path in (self.checkpoints, self.metrics.path, self.samples.path):
            if path.exists():
                log.warning("%s is of an earlier run; it is now %s", path, move_aside(path))

    def begin(self, config_text: str, step: int) -> None:
        """Write config.yaml and remove what was logged after ``step``."""
        (self.path / "config.yaml").write_text(config_text)
        self.metrics.cut(step)
        self.samples.cut(step)

    def close(self) -> None:
        self._lock.close()


def flatten_stats(stats: Mapping[str, Metric]) -> dict[str, float]:
    """Return merged metrics as plain numbers."""
    return {name: float(metric.value) for name, metric in stats.items()}


def replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: replace_non_finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(v) for v in value]
    return value
