"""The run folder, a stable contract: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/, plots/, log.txt.

Lines are appended whole and flushed. A full disk does not stop a run: lines wait in memory and are written with the
next. One run at a time owns a folder.
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

from coalign.files import move_aside
from coalign.types import Metric

log = logging.getLogger(__name__)


class FolderInUse(OSError):
    """Another process is writing to this run folder."""


class StepLog:
    """A file of one JSON object a line, each with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    def cut(self, step: int) -> None:
        """Forget lines of later steps (they will be made again) and a line cut in half by a crash."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                break
        aside = self.path.with_suffix(".writing")
        aside.write_text("".join(kept))
        os.replace(aside, self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self._waiting.append(json.dumps(finite(record), ensure_ascii=False) + "\n")
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "a") as out:
                out.write("".join(self._waiting))
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.truncate(self.path, size)
            log.warning("%s: %s; %d lines wait in memory", self.path, problem.strerror, len(self._waiting))
        else:
            self._waiting.clear()


def lock(folder: Path) -> IO[str]:
    """Make the folder, and have it until the file that is returned is closed. Raises FolderInUse."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a+")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FolderInUse(f"{folder} belongs to a run that is still going; choose another `output`") from None
    return file


class RunFolder:
    """Creates and locks the folder of a run. Raises FolderInUse, and OSError where it cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = lock(self.path)
        self.metrics = StepLog(self.path / "metrics.jsonl")
        self.samples = StepLog(self.path / "samples.jsonl")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def move_records_aside(self) -> None:
        """Move the checkpoints and lines of an earlier run aside, for a run that does not go on from them."""
        for path in (self.checkpoints, self.metrics.path, self.samples.path):
            if path.exists():
                log.warning("%s is of an earlier run; it is now %s", path, move_aside(path))

    def begin(self, config_text: str, step: int) -> None:
        """Write config.yaml and forget what was logged after ``step``."""
        (self.path / "config.yaml").write_text(config_text)
        self.metrics.cut(step)
        self.samples.cut(step)

    def close(self) -> None:
        self._lock.close()


def flatten(stats: Mapping[str, Metric]) -> dict[str, float]:
    """Merged metrics as plain numbers."""
    return {name: float(metric.value) for name, metric in stats.items()}


def finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return value
