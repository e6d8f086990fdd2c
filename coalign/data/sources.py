"""Reads rows of files, by number or sequentially: JSONL, JSON, parquet, text, `datasets.save_to_disk` directories.

Nothing here knows what a row means, and nothing is downloaded. A file that is only read sequentially gets no index and
is not held in memory.

`datasets` reads only its own directories here. Its readers of JSON and text force one schema on all rows, copy the data
into a cache, know no line numbers for error messages, and resume a stream by reading it again from the start.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import sys
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from coalign.files import describe_problem, read_json_object

Row = dict[str, Any]
FileEntry = tuple[Callable[[], Row], Callable[[], str], int]  # the row, its place for messages, start of the next row


class BadRow(ValueError):
    """An unusable row. ``reason`` names the policy that applies: missing, empty, identical, long; none for invalid."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


def _check_object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with keys, found {type(row).__name__}")
    return row


def is_number(value: Any) -> bool:
    """Whether a value of a row is a finite number. (`math.isfinite` raises for integers beyond the floats.)"""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class WatchedFiles:
    """Notices that files change after it was made: their sizes and times.

    A mapped file that is cut while it is read ends the process by SIGBUS, and rows that are rewritten in place would be
    learnt from unnoticed.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._found = {path: _stat(path) for path in paths}

    @property
    def written(self) -> float:
        """The time at which the newest file was written."""
        return max(time for _, time in self._found.values())

    def list_written_since(self, time: float) -> list[str]:
        return [path.name for path, (_, written) in self._found.items() if written > time]

    def check(self) -> None:
        """ValueError if a file has changed."""
        for path, before in self._found.items():
            if (now := _stat(path)) != before:
                raise ValueError(
                    f"{path} was changed while it is read: {before[0]:,} bytes before, {max(now[0], 0):,} now"
                    f"{'' if now[0] != before[0] else ', written anew'}. Restore it; the same command then continues"
                )


def _stat(path: Path) -> tuple[int, float]:
    """Size in bytes and time of the last change; (-1, 0.0) for a file that is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return -1, 0.0
    return found.st_size, found.st_mtime


class JsonLines:
    """A file with one JSON object per line; blank lines are skipped. A line is parsed when its row is read.

    Access by number keeps the byte offsets of its lines, of the first ``max_samples`` rows at least.
    Raises BadRow for a row that is not an object with keys.
    """

    def __init__(self, path: Path, max_samples: int | None = None) -> None:
        self.path, self._most = path, max_samples

    @cached_property
    def _offsets(self) -> array[int]:
        return array("Q", (offset for offset, _ in islice(self._lines(0), self._most)))

    @cached_property
    def _file(self) -> BinaryIO:
        return self.path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        self._file.seek(self._offsets[index])
        return self.parse(self._file.readline().removesuffix(b"\n"))

    @staticmethod
    def parse(line: bytes) -> Row:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadRow(f"not valid JSON: {error.msg} (column {error.colno})") from error
        except UnicodeDecodeError as error:
            raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists in lists in lists
            raise BadRow(f"not valid JSON: {error}") from error
        return _check_object(row)

    def where(self, index: int) -> str:
        """Return the place of row ``index`` for messages, such as FILE:LINE."""
        return self._line_at(self._offsets[index])

    def read(self, start: int) -> Iterator[FileEntry]:
        """Yield the rows in file order; ``start`` is 0, or the start of a row as an earlier reading reported it."""
        for offset, line in self._lines(start):
            yield partial(self.parse, line), partial(self._line_at, offset), offset + len(line)

    def _lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line) of the rows from byte ``start`` on."""
        with self.path.open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.isspace():
                    yield start, line
                start += len(line)

    def _line_at(self, offset: int) -> str:
        with self.path.open("rb") as file:
            blocks = iter(lambda: file.read(min(1 << 20, offset - file.tell())), b"")
            return f"{self.path}:{sum(block.count(10) for block in blocks) + 1}"


class TextLines(JsonLines):
    """A file with one document per line, under the key `text`; blank lines are skipped."""

    @staticmethod
    def parse(line: bytes) -> Row:
        try:
            return {"text": line.decode().rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error


class TableFile:
    """The rows of an indexable object that is already open."""

    def __init__(self, path: Path, length: int, get: Callable[[int], Any]) -> None:
        self.path, self._length, self._get = path, length, get

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return _check_object(self._get(index))

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"

    def read(self, start: int) -> Iterator[FileEntry]:
        for index in range(start, self._length):
            yield partial(self.__getitem__, index), partial(self.where, index), index + 1


class ParquetRows(TableFile):
    """A parquet file, read sequentially by row groups.

    Parquet has no access by number. For that, the file is unpacked once to a temporary Arrow file (TMPDIR), which is
    mapped.
    """

    def __init__(self, path: Path, max_samples: int | None = None) -> None:
        import pyarrow.parquet

        with _refuse_damage(path):
            self._file = pyarrow.parquet.ParquetFile(path)
        rows = self._file.metadata.num_rows
        length = rows if max_samples is None else min(rows, max_samples)
        super().__init__(path, length, lambda index: self._unpacked.slice(index, 1).to_pylist()[0])

    def read(self, start: int) -> Iterator[FileEntry]:
        groups = range(self._file.metadata.num_row_groups)
        ends = list(accumulate(self._file.metadata.row_group(i).num_rows for i in groups))
        begin = bisect_right(ends, start)
        index = ends[begin - 1] if begin else 0
        batches = self._file.iter_batches(batch_size=1024, row_groups=groups[begin:])
        while True:
            with _refuse_damage(self.path):
                if (batch := next(batches, None)) is None:
                    return
                rows = batch[max(0, start - index) :].to_pylist()
            for number, row in enumerate(rows, max(start, index)):
                yield partial(_check_object, row), partial(self.where, number), number + 1
            index += len(batch)

    @cached_property
    def _unpacked(self) -> Any:
        from pyarrow import ipc, memory_map

        descriptor, name = tempfile.mkstemp(suffix=".arrow")
        os.close(descriptor)
        try:
            with _refuse_damage(self.path), ipc.new_stream(name, self._file.schema_arrow) as out:
                written = 0
                for batch in self._file.iter_batches():
                    out.write_batch(batch)
                    written += len(batch)
                    if written >= self._length:
                        break
            return ipc.open_stream(memory_map(name)).read_all()
        finally:
            os.unlink(name)  # the mapping keeps the contents


@contextmanager
def _refuse_damage(path: Path) -> Iterator[None]:
    """Name the file in whatever pyarrow raises: ValueError and OSError, among others."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


RowFile = JsonLines | TableFile
ReadPosition = tuple[int, int, int]  # number of the file, position in it, number of the row that starts there
START: ReadPosition = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row that has not been read: its number, a function that reads it (or raises BadRow), and one for its place."""

    number: int
    row: Callable[[], Row]
    where: Callable[[], str]


class FileRows:
    """The rows of several files, one file after the other, numbered from 0; at most the first ``max_samples``."""

    def __init__(self, files: Sequence[RowFile], max_samples: int | None = None) -> None:
        self.files, self._most = list(files), max_samples
        self._watched = [WatchedFiles(list_files(file.path)) for file in self.files]

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    @property
    def written(self) -> float:
        """The time at which the newest file was written."""
        return max(watched.written for watched in self._watched)

    def list_written_since(self, time: float) -> str:
        return ", ".join(name for watched in self._watched for name in watched.list_written_since(time))

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._most is None else min(self._ends[-1], self._most)

    def __getitem__(self, number: int) -> Row:
        file, index = self._find(number)
        self._watched[file].check()
        return self.files[file][index]

    def where(self, number: int) -> str:
        """Return the place of the row for messages, such as FILE:LINE."""
        file, index = self._find(number)
        return self.files[file].where(index)

    def entry(self, number: int) -> SourceRow:
        return SourceRow(number, partial(self.__getitem__, number), partial(self.where, number))

    def read(self, place: ReadPosition = START) -> Iterator[tuple[SourceRow, ReadPosition]]:
        """Yield the rows from ``place`` on, each with the position of the next one. Needs no index and no length."""
        first, start, number = place
        for file in range(first, len(self.files)):
            try:
                for row, where, after in self.files[file].read(start):
                    if number == self._most:
                        return
                    self._watched[file].check()
                    yield SourceRow(number, row, where), (file, after, number + 1)
                    number += 1
            except (OSError, ValueError):
                self._watched[file].check()  # a better reason, if there is one
                raise
            start = 0

    def _find(self, number: int) -> tuple[int, int]:
        """Return the number of the file that has the row, and the row's number there."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.files[0].path} has {len(self)} rows, so no row {number}")
        file = bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)


def open_rows(path: str | Path, max_samples: int | None = None) -> FileRows:
    """Open the rows of ``path``, at most the first ``max_samples``; the ending decides how.

    `.jsonl`; `.json` (an array of objects, or one object per line); `.parquet`; `.txt` (one document per line, under
    the key `text`); a directory written by `datasets.save_to_disk`; or a pattern (`shards/*.jsonl`), in the order of
    names. FileNotFoundError suggests the nearest name. ValueError for any other ending, and for files without rows.
    """
    rows = FileRows([_open(found, max_samples) for found in _match_files(Path(path))], max_samples)
    if next(rows.read(), None) is None:
        raise ValueError(f"{path} holds no rows")
    return rows


def list_files(path: Path) -> list[Path]:
    """List the files of a directory, or a file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _match_files(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise FileNotFoundError(f"data file {path} does not exist{_suggestion(path)}")
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise FileNotFoundError(f"no data file matches {path}")
    return [Path(name) for name in found]


def _open(path: Path, max_samples: int | None) -> RowFile:
    opener = _open_directory if path.is_dir() else OPENERS.get(path.suffix.lower())
    if opener is None:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(OPENERS)}, or a `datasets` directory")
    return opener(path, max_samples)


def _open_json(path: Path, max_samples: int | None) -> RowFile:
    with path.open("rb") as file:
        first = next((line.strip()[:1] for line in file if line.strip()), b"")
    if first != b"[":
        return JsonLines(path, max_samples)
    try:
        rows = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {describe_problem(error)}") from error
    return TableFile(path, len(rows), rows.__getitem__)


def _open_directory(path: Path, max_samples: int | None) -> RowFile:
    if (path / "dataset_dict.json").exists():
        splits = read_json_object(path / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise ValueError(f"{path / 'dataset_dict.json'} names no splits")
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
    return TableFile(path, len(rows), rows.__getitem__)


OPENERS: Mapping[str, Callable[[Path, int | None], RowFile]] = {
    ".jsonl": JsonLines,
    ".json": _open_json,
    ".parquet": ParquetRows,
    ".txt": TextLines,
}


def _suggestion(path: Path) -> str:
    """Suggest the nearest name in the deepest folder that exists."""
    parent = path.parent
    missing = path.name
    while not parent.exists():
        missing, parent = parent.name, parent.parent
    near = difflib.get_close_matches(missing, [entry.name for entry in parent.iterdir()], n=1)
    if near:
        return f"; did you mean {parent / near[0]}?"
    return f" (there is no {missing} in {parent.resolve()})"
