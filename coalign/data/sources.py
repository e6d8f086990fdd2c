"""Rows of one or several files: JSONL, JSON, parquet, text and directories written by `datasets.save_to_disk`.

Nothing here knows what a row means. Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import glob
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path

from coalign.data.formats import BadRow, File, JsonLines, Parquet, Row, Table, TextLines

__all__ = ["START", "BadRow", "FileRows", "ReadPosition", "SourceRow", "Table", "open_rows"]

ReadPosition = tuple[int, int, int]  # file, where in it, and the number of the row that starts there
START: ReadPosition = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row that is not read yet: its number in the source, itself (BadRow if broken), where a person finds it."""

    number: int
    row: Callable[[], Row]
    where: Callable[[], str]


class FileRows:
    """The rows of ``files``, one file after the other, by number from 0; at most the first ``max_samples``."""

    def __init__(self, files: Sequence[File], max_samples: int | None = None) -> None:
        self.files, self._most = list(files), max_samples

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._most is None else min(self._ends[-1], self._most)

    def __getitem__(self, number: int) -> Row:
        file, index = self._find(number)
        return file[index]

    def where(self, number: int) -> str:
        """The place a person would look for the row."""
        file, index = self._find(number)
        return file.where(index)

    def entry(self, number: int) -> SourceRow:
        return SourceRow(number, partial(self.__getitem__, number), partial(self.where, number))

    def read(self, place: ReadPosition = START) -> Iterator[tuple[SourceRow, ReadPosition]]:
        """The rows in turn from ``place`` on, each with the place of the next. Needs no index and no length."""
        first, start, number = place
        for which in range(first, len(self.files)):
            for row, where, after in self.files[which].read(start):
                if number == self._most:
                    return
                yield SourceRow(number, row, where), (which, after, number + 1)
                number += 1
            start = 0

    def _find(self, number: int) -> tuple[File, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"{self.files[0].path} has {len(self)} rows, so no row {number}")
        which = bisect_right(self._ends, number)
        return self.files[which], number - (self._ends[which - 1] if which else 0)


def open_rows(path: str | Path, max_samples: int | None = None) -> FileRows:
    """The rows of ``path`` (at most the first ``max_samples``), each file by its ending.

    `.jsonl`; `.json` (an array of objects, or one object a line); `.parquet`; `.txt` (a document a line, under the key
    `text`); a directory: `datasets.save_to_disk`; or several of them by a pattern (`shards/*.jsonl`), in the order of
    their names.
    Raises FileNotFoundError with the nearest name there is, ValueError for any other ending or for files without rows.
    """
    rows = FileRows([_open(found, max_samples) for found in _matching(Path(path))], max_samples)
    if next(rows.read(), None) is None:
        raise ValueError(f"{path} holds no rows")
    return rows


def _matching(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise FileNotFoundError(f"data file {path} does not exist{_suggestion(path)}")
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise FileNotFoundError(f"no data file matches {path}")
    return [Path(name) for name in found]


def _open(path: Path, max_samples: int | None) -> File:
    opener = _open_directory if path.is_dir() else OPENERS.get(path.suffix.lower())
    if opener is None:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(OPENERS)}, or a `datasets` directory")
    return opener(path, max_samples)


def _open_json(path: Path, max_samples: int | None) -> File:
    with path.open("rb") as file:
        first = next((line.strip()[:1] for line in file if line.strip()), b"")
    if first != b"[":
        return JsonLines(path, max_samples)
    try:
        rows = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    return Table(path, len(rows), rows.__getitem__)


def _open_directory(path: Path, max_samples: int | None) -> File:
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(
            f"{path} holds the splits {', '.join(splits)}: name one of them, for example {path / splits[0]}"
        )
    if not (path / "state.json").exists():
        raise ValueError(
            f"{path} is a directory that `datasets.save_to_disk` has not written; name a file inside it, or several "
            f"by a pattern, for example {path / '*.jsonl'}"
        )
    import datasets

    rows = datasets.load_from_disk(str(path))
    return Table(path, len(rows), rows.__getitem__)


OPENERS: Mapping[str, Callable[[Path, int | None], File]] = {
    ".jsonl": JsonLines,
    ".json": _open_json,
    ".parquet": Parquet,
    ".txt": TextLines,
}


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
