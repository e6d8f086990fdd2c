"""What of an interrupted conversion is finished: one line a file, beside what it has written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from coalign.weights.convert.files import digest

JOURNAL = ".journal.jsonl"


class ConversionJournal:
    """``what``: says which conversion it is, so that only the same one goes on."""

    def __init__(self, folder: Path, what: dict[str, Any]) -> None:
        self.path, self.what = folder / JOURNAL, what

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True)
        self._append(self.what)

    def add(self, number: int, record: dict[str, Any]) -> None:
        self._append({"number": number, **record})

    def _append(self, line: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finished(self) -> dict[int, dict[str, Any]]:
        """Records of files that are there as they were written. ValueError if they are of another conversion."""
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        entries = [line for line in map(_read, lines) if line is not None]
        if not entries or entries[0] != json.loads(json.dumps(self.what)):
            changed = sorted(key for key in self.what if not entries or entries[0].get(key) != self.what[key])
            raise ValueError(
                f"{self.path.parent} was left by another conversion (different: {', '.join(changed)}): delete it"
            )
        found = {}
        for entry in entries[1:]:
            number, record = entry.pop("number"), entry
            file = self.path.parent / record["name"]
            if file.is_file() and digest(file) == {key: record[key] for key in ("size", "xxh3_128")}:
                found[number] = record
        return found


def _read(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None  # the line that was being written
