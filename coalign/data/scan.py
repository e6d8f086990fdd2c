"""A source that has been gone through: what can be used is known before the first step.

Every row is read, rendered and tokenised once when the source opens (thousands of rows a second). Only row numbers are
kept; a row is tokenised again when it is drawn.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterator
from typing import Any, Protocol

from coalign.data.examples import MARKS, Example, RowEncoder
from coalign.data.shuffle import DataPhase
from coalign.data.sources import FileRows

log = logging.getLogger(__name__)


class ExampleSource(Protocol):
    """The usable rows of a source, in the order of its files: ``source[i]`` is what row i of them becomes.

    ``tokens`` is how many they hold together.
    """

    name: str
    tokens: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> list[Example]: ...

    def report(self) -> str:
        """What became of the rows: "7473 rows: 7470 used, 2 empty, 1 over 1024 tokens"."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """The number of usable rows, and a hash of their contents and tokens."""
        ...


class SourceScan:
    """Goes through the rows (of ``phase``) and yields those that can be used: (row number, what the row becomes).

    Once it is at the end, ``tokens`` and ``hash`` are those of all that it yielded.
    """

    def __init__(self, examples: RowEncoder, rows: FileRows, phase: DataPhase | None) -> None:
        self.examples, self.rows, self.phase = examples, rows, phase
        self.tokens = 0
        self._seen = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[tuple[int, list[Example]]]:
        for number in range(len(self.rows)):
            if self.phase is not None and number not in self.phase:
                continue
            if (found := self.examples.use(self.rows.entry(number))) is not None:
                self._note(found)
                yield number, found

    @property
    def hash(self) -> str:
        return self._seen.hexdigest()

    def _note(self, found: list[Example]) -> None:
        for example in found:
            self.tokens += len(example.tokens)
            self._seen.update(array("i", example.tokens).tobytes())
            row = {key: value for key, value in example.row.items() if key not in MARKS}
            text = json.dumps([row, example.columns], sort_keys=True, default=lambda value: type(value).__name__)
            self._seen.update(text.encode())


class ScannedSource:
    """An ExampleSource that tokenises what is drawn."""

    def __init__(self, examples: RowEncoder, rows: FileRows, phase: DataPhase | None = None) -> None:
        """ValueError for a row that may not be dropped, and if none is left."""
        scan = SourceScan(examples, rows, phase)
        self.name = examples.name
        self._examples, self._rows, self._phase = examples, rows, phase
        self._used = array("q", (number for number, _ in scan))
        self.tokens, self._hash = scan.tokens, scan.hash
        check_usable(self, examples)

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._used[index]
        return self._examples.read(self._rows[number], number)

    def report(self) -> str:
        return f"{describe_rows(self._examples, self._phase, len(self._rows))}: {self._examples.report()}"

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "rows": len(self), "hash": self._hash}


def describe_rows(examples: RowEncoder, phase: DataPhase | None, rows: int) -> str:
    """How many rows a report is about: "7473 rows", or "1495 of 7473 rows (phase sft)"."""
    if phase is None:
        return f"{rows} rows"
    return f"{examples.counts['rows']} of {rows} rows (phase {phase.name})"


def check_usable(source: ExampleSource, examples: RowEncoder) -> None:
    """ValueError for a source without usable rows; a warning of what its kind finds odd about them."""
    if not len(source):
        bound = f"; data.{examples.longest} is the bound" if examples.counts["long"] else ""
        raise ValueError(f"{source.name} has no usable rows ({source.report()}){bound}")
    if concern := examples.concern():
        log.warning("%s: %s", source.name, concern)
