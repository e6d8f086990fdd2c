"""Output that outlives a kill: what is finished is kept beside the output, which appears whole at the end."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.engine.hooks.run_folder import FolderInUse, replace_non_finite

log = logging.getLogger(__name__)

JsonRecord = dict[str, Any]


class RecordStream:
    """Stands in for Partial where nothing is to be kept: each record is handed on at once."""

    done = 0

    def __init__(self, take: Callable[[JsonRecord], None]) -> None:
        self._take = take
        self._units: list[list[JsonRecord]] = []

    def __enter__(self) -> RecordStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, unit: Sequence[JsonRecord]) -> None:
        self._units.append(list(unit))
        for record in unit:
            self._take(record)

    def units(self) -> Iterator[list[JsonRecord]]:
        yield from self._units

    def finish(self) -> None:
        pass


class ResumableOutput:
    """``OUTPUT.partial``: a line that says what the results depend on (``fingerprint``), then one line for each unit of
    work (a list of records), in order.

    ``done`` units are there already when another process was killed at the same work; a file of other work is begun
    anew, with a warning that names the difference. Raises FolderInUse while another process writes it.
    """

    def __init__(self, output: Path, fingerprint: Mapping[str, Any]) -> None:
        self.output = output
        self.path = output.with_name(output.name + ".partial")
        self.done = 0
        output.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115 (held until the work is done)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise FolderInUse(f"{output} is being written by another process") from None
        self._continue(json.loads(json.dumps(fingerprint)))

    def __enter__(self) -> ResumableOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if error[0] is not None and self.done:
            log.warning("%s keeps what is finished: the same call goes on from there", self.path)

    def add(self, unit: Sequence[JsonRecord]) -> None:
        """Keep the records of a finished unit."""
        self._write(replace_non_finite(list(unit)))
        self.done += 1

    def units(self) -> Iterator[list[JsonRecord]]:
        """Every unit so far."""
        with open(self.path, encoding="utf-8") as lines:
            next(lines)
            yield from map(json.loads, lines)

    def finish(self) -> None:
        """Make the output, one line a record, and take the partial file away."""
        aside = self.output.with_name(self.output.name + ".writing")
        with open(aside, "w", encoding="utf-8") as out:
            for unit in self.units():
                out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in unit)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, self.output)
        self.path.unlink()

    def _continue(self, fingerprint: Mapping[str, Any]) -> None:
        """Count the whole lines and cut off the rest; begin anew unless they are of the same work."""
        self._file.seek(0)
        header = self._file.readline()
        before = json.loads(header) if header.endswith(b"\n") else {}
        if before == fingerprint:
            end = len(header)
            for line in self._file:
                if line.endswith(b"\n"):
                    self.done, end = self.done + 1, end + len(line)
            self._file.truncate(end)
            return
        if before:
            changed = sorted(key for key in {*before, *fingerprint} if before.get(key) != fingerprint.get(key))
            log.warning("%s: %s changed since it was begun, so it begins anew", self.path, " and ".join(changed))
        self._file.truncate(0)
        self._write(fingerprint)

    def _write(self, value: Any) -> None:
        self._file.write((json.dumps(value, ensure_ascii=False) + "\n").encode())
        self._file.flush()
