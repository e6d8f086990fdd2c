"""The files of a run: config.yaml, metrics.jsonl, samples.jsonl, rollouts/, checkpoints/, …. Their names are stable.

A disk that is full or unreachable does not stop a run: records that cannot be written wait in memory and are written
with the next one. Only one run at a time may write to a folder.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coalign.config.errors import located_at
from coalign.config.schema import RunConfig
from coalign.engine.hooks.rollout_files import RolloutFiles
from coalign.files import RecordFile, move_aside, write_atomically, write_text_atomically
from coalign.run_files.control import refuse_request
from coalign.run_files.lock import lock_folder, read_owner
from coalign.run_files.records import parse_record
from coalign.run_files.rollouts import FOLDER
from coalign.run_files.state import StateFile
from coalign.types import Metric

log = logging.getLogger(__name__)
JOURNAL = "journal.jsonl"


class StepLog:
    """A file of one JSON object a line, each with a `step`. Lines end at `\\n` alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_path = path.with_name(f"{path.name}.cut")
        self._file = RecordFile(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.append((json.dumps(replace_non_finite(record), ensure_ascii=False) + "\n").encode())

    def cut(self, step: int) -> None:
        """Move the lines of later steps, which will train again, and lines that cannot be read to `NAME.cut`."""
        if not self.path.exists():
            return
        broken = 0
        # Bytes, because a crash may cut a character, and because text may hold separators that JSON does not escape.
        with write_atomically(self.path) as replacement, open(self.path, "rb") as lines, open(replacement, "wb") as out:
            for line in lines:
                record = parse_record(line)
                broken += record is None
                if record is not None and record["step"] <= step:
                    out.write(line.rstrip(b"\n") + b"\n")
                else:
                    with open(self.cut_path, "ab") as cut:
                        cut.write(line.rstrip(b"\n") + b"\n")
        if broken:
            log.warning("%s: %d lines cannot be read; they are now in %s", self.path, broken, self.cut_path)

    def find_maximum(self, name: str) -> float:
        """Return the greatest value of a metric over all lines, also those that were cut; 0 if no line has it."""
        values = [0.0]
        for path in (self.path, self.cut_path):
            if path.exists():
                with open(path, "rb") as lines:
                    recorded = [(parse_record(line) or {}).get(name) for line in lines]
                    values += [value for value in recorded if isinstance(value, int | float)]
        return max(values)


class RunFolder:
    """Creates and locks the folder of a run. Raises FolderInUse, and OSError where it cannot be written."""

    def __init__(self, path: str | Path, keep_rollouts: int = 0) -> None:
        self.path = Path(path)
        previous = read_owner(self.path)
        self._lock = lock_folder(self.path)
        owner = read_owner(self.path)
        self.epoch = owner.epoch if owner else 1  # number of owners of the lock so far
        # The lock does not tell whether a previous owner on another machine still runs.
        self.waits = previous is None or not previous.is_here
        refuse_request(self.path, "the run ended before it came to this")
        self.state = StateFile(self.path)
        self.metrics = StepLog(self.path / "metrics.jsonl")
        self.samples = StepLog(self.path / "samples.jsonl")
        self.rollouts = RolloutFiles(self.path, keep_rollouts)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    def move_records_aside(self) -> None:
        """Rename the checkpoints and records of an earlier run, for a run that does not resume from them."""
        more_records = (self.path / FOLDER, self.path / "trackers.json", self.path / "tensorboard")
        records = [path for log in (self.metrics, self.samples) for path in (log.path, log.cut_path)]
        for path in (self.checkpoints, *records, self.journal, *more_records):
            if path.exists():
                log.warning("%s is of an earlier run; it is now %s", path, move_aside(path))

    def begin(self, config_text: str, step: int) -> None:
        """Write config.yaml, and move the records of an earlier run after ``step`` aside.

        A config.yaml with another text becomes config.1.yaml, config.2.yaml, …: the oldest has the lowest number.
        """
        config = self.path / "config.yaml"
        if config.exists() and (text := config.read_text()) != config_text:
            former = (self.path / f"config.{number}.yaml" for number in count(1))
            write_text_atomically(next(file for file in former if not file.exists()), text)
        write_text_atomically(config, config_text)
        self.cut(step)

    def cut(self, step: int) -> None:
        """Move the records after ``step`` aside, and delete their rollouts."""
        self.metrics.cut(step)
        self.samples.cut(step)
        self.rollouts.cut(step)

    def close(self) -> None:
        """Wait until everything is written, refuse pending requests, and release the lock."""
        self.rollouts.close()
        with suppress(OSError):
            refuse_request(self.path, "the run has ended")
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


def check_folders(config: RunConfig) -> None:
    """Refuse folders in which nothing can be written: the run's, and the cache of its data."""
    for key, name in {("output",): config.output, ("data", "cache"): config.data.cache}.items():
        folder = Path(name or ".").absolute()
        while not folder.exists():
            folder = folder.parent
        with located_at(*key):
            try:
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise ValueError(f"nothing can be written in '{folder}': {error.strerror}") from error
