"""Rows of files: JSONL, JSON, parquet and directories written by `datasets.save_to_disk`, by row number.

Nothing here knows what a row means. A JSONL file is mapped and only the byte offsets of its lines are kept; the others
are as lazy as their format allows. Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import json
import mmap
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class BadRow(ValueError):
    """A row that cannot be used. ``reason`` is the policy it falls under: missing, empty, long; invalid has none."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


class Rows(Protocol):
    """Rows by number; ``where(i)`` is the place a person would look for row i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


def open_rows(path: str | Path, max_samples: int | None = None) -> Rows:
    """The rows of ``path`` (at most the first ``max_samples``), chosen by its ending.

    `.jsonl`; `.json` (an array of objects, or one object a line); `.parquet`; a directory: `datasets.save_to_disk`.
    Raises FileNotFoundError with the nearest name there is, ValueError for any other ending or for a file without rows.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data file {path} does not exist{_suggestion(path)}")
    opener = _open_directory if path.is_dir() else OPENERS.get(path.suffix.lower())
    if opener is None:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(OPENERS)}, or a `datasets` directory")
    rows = opener(path, max_samples)
    if not len(rows):
        raise ValueError(f"{path} holds no rows")
    return rows


class JsonLines:
    """One JSON object a line; blank lines are skipped. The line is parsed, and refused, when its row is asked for."""

    def __init__(self, path: Path, max_samples: int | None = None) -> None:
        self.path = path
        self._offsets = array("Q")
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
            offset = 0
            for line in file:
                if len(self._offsets) == max_samples:
                    break
                if not line.isspace():
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self._offsets[index]
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : end if end >= 0 else len(self._bytes)]
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadRow(f"not valid JSON: {error.msg} (column {error.colno})") from error
        except UnicodeDecodeError as error:
            raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error
        return _object(row)

    def where(self, index: int) -> str:
        line = self._bytes[: self._offsets[index]].count(b"\n") + 1
        return f"{self.path}:{line}"


class Table:
    """Rows of something indexable that is already open."""

    def __init__(self, path: Path, length: int, get: Callable[[int], Any]) -> None:
        self.path, self._length, self._get = path, length, get

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"{self.path} has {self._length} rows, so no row {index}")
        return _object(self._get(index))

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"


def _open_json(path: Path, max_samples: int | None) -> Rows:
    with path.open("rb") as file:
        first = next((line.strip()[:1] for line in file if line.strip()), b"")
    if first != b"[":
        return JsonLines(path, max_samples)
    try:
        rows = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    rows = rows[:max_samples]
    return Table(path, len(rows), rows.__getitem__)


def _open_parquet(path: Path, max_samples: int | None) -> Rows:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path).slice(0, max_samples)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    return Table(path, len(table), lambda index: table.slice(index, 1).to_pylist()[0])


def _open_directory(path: Path, max_samples: int | None) -> Rows:
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(
            f"{path} holds the splits {', '.join(splits)}: name one of them, for example {path / splits[0]}"
        )
    if not (path / "state.json").exists():
        raise ValueError(f"{path} is a directory that `datasets.save_to_disk` has not written; name a file inside it")
    import datasets

    rows = datasets.load_from_disk(str(path))
    return Table(path, min(len(rows), max_samples or len(rows)), rows.__getitem__)


OPENERS: Mapping[str, Callable[[Path, int | None], Rows]] = {
    ".jsonl": JsonLines,
    ".json": _open_json,
    ".parquet": _open_parquet,
}


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with keys, found {type(row).__name__}")
    return row


def _suggestion(path: Path) -> str:
    """What the person may have meant: the nearest name in the deepest folder that exists."""
    parent = path.parent
    missing = path.name
    while not parent.exists():
        missing, parent = parent.name, parent.parent
    near = difflib.get_close_matches(missing, [entry.name for entry in parent.iterdir()], n=1)
    if near:
        return f"; did you mean {parent / near[0]}?"
    return f" (there is no {missing} in {parent.resolve()})"
