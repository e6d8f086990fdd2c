"""The rows of one file, by number and in turn: JSONL, text, parquet, and whatever is indexable once it is open.

What is not asked for is not done: a file that is only read in turn gets no index, and none is held in memory.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

Row = dict[str, Any]
Found = tuple[Callable[[], Row], Callable[[], str], int]  # the row, where a person finds it, where the next one starts


class BadRow(ValueError):
    """A row that cannot be used. ``reason`` is the policy it falls under: missing, empty, long; invalid has none."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


class File(Protocol):
    """The rows of one file, numbered from 0. BadRow for one that is not an object with keys.

    A file that is opened with ``max_samples`` needs no access by number to more than the first so many.
    """

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """The place a person would look for row ``index``."""
        ...

    def read(self, start: int) -> Iterator[Found]:
        """The rows in turn; ``start`` is 0, or where an earlier reading said that the next row starts."""
        ...


def _parse(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error
    return _object(row)


def _text(line: bytes) -> Row:
    try:
        return {"text": line.decode().rstrip("\r\n")}
    except UnicodeDecodeError as error:
        raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error


def _object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with keys, found {type(row).__name__}")
    return row


class JsonLines:
    """One JSON object a line; blank lines are skipped. The line is parsed, and refused, when its row is asked for.

    Access by number maps the file and keeps the byte offsets of its lines.
    """

    parse: ClassVar[Callable[[bytes], Row]] = staticmethod(_parse)

    def __init__(self, path: Path, max_samples: int | None = None) -> None:
        self.path, self._most = path, max_samples

    @cached_property
    def _offsets(self) -> array[int]:
        return array("Q", (offset for offset, _ in islice(self._lines(0), self._most)))

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        start = self._offsets[index]
        end = self._bytes.find(b"\n", start)
        return self.parse(self._bytes[start : end if end >= 0 else len(self._bytes)])

    def where(self, index: int) -> str:
        return self._line_at(self._offsets[index])

    def read(self, start: int) -> Iterator[Found]:
        for offset, line in self._lines(start):
            yield partial(self.parse, line), partial(self._line_at, offset), offset + len(line)

    def _lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line) of the rows from byte ``start`` on."""
        with self.path.open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.isspace():
                    yield start, line
                start += len(line)

    def _line_at(self, offset: int) -> str:
        return f"{self.path}:{self._bytes[:offset].count(10) + 1}"


class TextLines(JsonLines):
    """A document a line, under the key `text`; blank lines are skipped."""

    parse = staticmethod(_text)


class Table:
    """Rows of something indexable that is already open."""

    def __init__(self, path: Path, length: int, get: Callable[[int], Any]) -> None:
        self.path, self._length, self._get = path, length, get

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return _object(self._get(index))

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"

    def read(self, start: int) -> Iterator[Found]:
        for index in range(start, self._length):
            yield partial(self.__getitem__, index), partial(self.where, index), index + 1


class Parquet:
    """Read in turn, row group by row group. Access by number unpacks the file, once, next to other temporary files
    (TMPDIR), and maps it from there: parquet itself has none."""

    def __init__(self, path: Path, max_samples: int | None = None) -> None:
        import pyarrow.parquet

        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a readable parquet file: {error}") from error
        rows = self._file.metadata.num_rows
        self._length = rows if max_samples is None else min(rows, max_samples)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return self._unpacked.slice(index, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"

    def read(self, start: int) -> Iterator[Found]:
        groups = range(self._file.metadata.num_row_groups)
        ends = list(accumulate(self._file.metadata.row_group(i).num_rows for i in groups))
        begin = bisect_right(ends, start)
        index = ends[begin - 1] if begin else 0
        for batch in self._file.iter_batches(batch_size=1024, row_groups=groups[begin:]):
            for number, row in enumerate(batch[max(0, start - index) :].to_pylist(), max(start, index)):
                yield partial(_object, row), partial(self.where, number), number + 1
            index += len(batch)

    @cached_property
    def _unpacked(self) -> Any:
        from pyarrow import ipc, memory_map

        descriptor, name = tempfile.mkstemp(suffix=".arrow")
        os.close(descriptor)
        try:
            with ipc.new_stream(name, self._file.schema_arrow) as out:
                written = 0
                for batch in self._file.iter_batches():
                    out.write_batch(batch)
                    written += len(batch)
                    if written >= self._length:
                        break
            return ipc.open_stream(memory_map(name)).read_all()
        finally:
            os.unlink(name)  # what is mapped stays until nobody maps it
