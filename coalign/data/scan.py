"""Sources that are read completely before the first step, so that their usable rows are known.

All rows are read, rendered and tokenised once when a source opens (thousands of rows a second). Only row numbers are
kept; a row is tokenised again when it is drawn.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from typing import Any, Protocol

from coalign.data.examples import MARKS, Example, RowEncoder
from coalign.data.shuffle import DataPhase
from coalign.data.sources import FileRows

log = logging.getLogger(__name__)


class ExampleSource(Protocol):
    """The usable rows of a source in file order: ``source[i]`` is row i, encoded. ``tokens`` is their total length."""

    name: str
    tokens: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> list[Example]: ...

    def report(self) -> str:
        """Summarise what became of the rows: "7473 rows: 7470 used, 2 empty, 1 over 1024 tokens"."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """The source's name, its number of usable rows, and a hash of their contents and tokens."""
        ...


class SourceScan:
    """Reads all rows (of ``phase``) and yields the usable ones: (row number, examples).

    After the last row, ``tokens`` and ``hash`` cover everything that was yielded.
    """

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None) -> None:
        self.encoder, self.rows, self.phase = encoder, rows, phase
        self.tokens = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[tuple[int, list[Example]]]:
        for number in range(len(self.rows)):
            if self.phase is not None and number not in self.phase:
                continue
            if (examples := self.encoder.use(self.rows.entry(number))) is not None:
                for example in examples:
                    self._add(example)
                yield number, examples

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()

    def _add(self, example: Example) -> None:
        self.tokens += len(example.tokens)
        self._digest.update(array("i", example.tokens).tobytes())
        row = {key: value for key, value in example.row.items() if key not in MARKS}
        text = json.dumps([row, example.columns], sort_keys=True, default=lambda value: type(value).__name__)
        self._digest.update(text.encode())


class FileSource(ABC):
    """Base of sources that read rows of files. Its encoder has counted all rows when it is initialised."""

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None, tokens: int, hash: str) -> None:
        """ValueError if no row is usable. Logs the encoder's warning about the rows."""
        self.name, self.tokens, self._hash = encoder.name, tokens, hash
        self._encoder, self._rows, self._phase = encoder, rows, phase
        if not len(self):
            limit = f"; data.{encoder.longest} is the bound" if encoder.counts["long"] else ""
            raise ValueError(f"{self.name} has no usable rows ({self.report()}){limit}")
        if warning := encoder.warning():
            log.warning("%s: %s", self.name, warning)

    @abstractmethod
    def __len__(self) -> int: ...

    def report(self) -> str:
        rows = f"{len(self._rows)} rows"
        if self._phase is not None:
            rows = f"{self._encoder.counts['rows']} of {rows} (phase {self._phase.name})"
        return f"{rows}: {self._encoder.report()}"

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "rows": len(self), "hash": self._hash}


class ScannedSource(FileSource):
    """An ExampleSource that tokenises a row whenever it is drawn."""

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None = None) -> None:
        """ValueError for a row that may not be dropped, and if no row is usable."""
        scan = SourceScan(encoder, rows, phase)
        self._used = array("q", (number for number, _ in scan))
        super().__init__(encoder, rows, phase, scan.tokens, scan.hash)

    def __len__(self) -> int:
        return len(self._used)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._used[index]
        return self._encoder.read(self._rows[number], number)
