"""Reads rows of files, by number or sequentially: JSONL, JSON, CSV, parquet, Arrow, text, compressed or not.

Nothing here knows what a row means. A file that is only read sequentially gets no index and is not held in memory.
`coalign.hub_data` finds and downloads the files of the hub's datasets.

The readers of tables are pyarrow's. Lines are read here: the readers of `datasets` force one schema on all rows, copy
the data into a cache, know no line numbers for error messages, and resume a stream by reading it again from the start.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from coalign.data.raw_files import open_binary, read_array, read_first_byte, refuse_brackets
from coalign.files import WatchedFiles, describe_problem, open_regular, read_json_object, require_inner_name
from coalign.hub import HubError, HubFile, explain
from coalign.hub_data import CODECS, fetch_data, is_dataset, is_url, load_features, pin_data

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
FileEntry = tuple[Callable[[], Row], Callable[[], str], int]  # row, its location for messages, start of the next row


class BadRow(ValueError):
    """An unusable row. ``reason`` names the policy that applies: missing, empty, identical, long; none for invalid.

    ``origin`` names the model's setting for which it is too long; empty where that is one of `data`.
    """

    def __init__(self, message: str, reason: str = "invalid", origin: str = "") -> None:
        super().__init__(message)
        self.reason, self.origin = reason, origin


def _check_object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise BadRow(f"expected an object with keys, found {type(row).__name__}")
    return row


def read_number(value: Any) -> Any:
    """Convert a text to the number that it spells (CSV tables have only texts); return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float({"true": "1", "false": "0"}.get(value.strip().lower(), value))
    except ValueError:
        return value


def is_number(value: Any) -> bool:
    """Whether a value of a row is a finite number. (`math.isfinite` raises for integers beyond the floats.)"""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


DataPath = Path | HubFile


class _JsonLines:
    """A file with one JSON object per line; blank lines are skipped. A line is parsed when its row is read.

    Access by number keeps the byte offsets of the lines, at most of the first ``max_samples`` rows; it decompresses a
    compressed file to a temporary one (TMPDIR). Offsets refer to the decompressed text. Raises BadRow for a row that is
    not an object with keys.
    """

    def __init__(self, path: DataPath, max_samples: int | None = None) -> None:
        self.path, self._limit = path, max_samples

    @cached_property
    def _offsets(self) -> array[int]:
        return array("Q", (offset for offset, _ in islice(self._lines(0), self._limit)))

    @cached_property
    def _file(self) -> BinaryIO:
        file = open_binary(self.path)
        if file.seekable():
            return file
        unpacked = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this object)
        with _refuse_damage(self.path):
            shutil.copyfileobj(file, unpacked, 1 << 20)
        return cast(BinaryIO, unpacked)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        self._file.seek(self._offsets[index])
        return self.parse(self._file.readline().removesuffix(b"\n"))

    @staticmethod
    def parse(line: bytes) -> Row:
        try:
            refuse_brackets(line)
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadRow(f"not valid JSON: {error.msg} (column {error.colno})") from error
        except UnicodeDecodeError as error:
            raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists in lists in lists
            raise BadRow(f"not valid JSON: {error}") from error
        return _check_object(row)

    def where(self, index: int) -> str:
        """Return the location of row ``index`` for messages, such as FILE:LINE."""
        return self._line_at(self._offsets[index])

    def read(self, start: int) -> Iterator[FileEntry]:
        """Yield the rows in file order; ``start`` is 0, or the start of a row as an earlier reading reported it."""
        for offset, line in self._lines(start):
            yield partial(self.parse, line), partial(self._line_at, offset), offset + len(line)

    def _lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line) of the rows from byte ``start`` on."""
        with _refuse_damage(self.path), open_binary(self.path) as file:
            skip(file, start)
            for line in file:
                if line.removeprefix(BOM_UTF8).strip():
                    yield start, line
                start += len(line)

    def _line_at(self, offset: int) -> str:
        with open_binary(self.path) as file:
            return f"{self.path}:{sum(block.count(10) for block in _read_blocks(file, offset)) + 1}"


def skip(file: BinaryIO, count: int) -> None:
    """Skip the first ``count`` bytes; a file that cannot seek is read."""
    if file.seekable():
        file.seek(count)
    else:
        for _ in _read_blocks(file, count):
            pass


def _read_blocks(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count and (block := file.read(min(1 << 20, count))):
        count -= len(block)
        yield block


class _TextLines(_JsonLines):
    """A file with one document per line, under the key `text`; blank lines are skipped."""

    @staticmethod
    def parse(line: bytes) -> Row:
        try:
            return {"text": line.removeprefix(BOM_UTF8).decode().rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise BadRow(f"not valid UTF-8: {error.reason} (byte {error.start + 1})") from error


class _ObjectRows:
    """The rows of a list in memory."""

    def __init__(self, path: DataPath, rows: Sequence[Any]) -> None:
        self.path, self._rows = path, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return _check_object(self._rows[index])

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"

    def read(self, start: int) -> Iterator[FileEntry]:
        for index in range(start, len(self)):
            yield partial(self.__getitem__, index), partial(self.where, index), index + 1


class _TableRows(ABC):
    """A file of a table, read sequentially by batches of rows.

    For access by number, its first ``max_samples`` rows are unpacked once to a temporary Arrow file (TMPDIR), which is
    mapped.
    """

    def __init__(self, path: DataPath, max_samples: int | None = None) -> None:
        self.path, self._limit = path, max_samples

    @abstractmethod
    def read_batches(self, start: int) -> tuple[pyarrow.Schema, int, Iterator[pyarrow.RecordBatch]]:
        """Return the schema, the number of the first row (``start`` or an earlier one), and the batches from it on.

        Raises pyarrow's errors.
        """

    def __len__(self) -> int:
        return len(self._unpacked)

    def __getitem__(self, index: int) -> Row:
        return self._decode(self._unpacked.schema)(self._unpacked.slice(index, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"

    def read(self, start: int) -> Iterator[FileEntry]:
        with _refuse_damage(self.path):
            schema, index, batches = self.read_batches(start)
        decode = self._decode(schema)
        while True:
            with _refuse_damage(self.path):
                if (batch := next(batches, None)) is None:
                    return
                rows = batch.slice(max(0, start - index)).to_pylist()
            for number, row in enumerate(rows, max(start, index)):
                yield partial(decode, row), partial(self.where, number), number + 1
            index += len(batch)

    @cached_property
    def _unpacked(self) -> pyarrow.Table:
        from pyarrow import ipc, memory_map

        descriptor, name = tempfile.mkstemp(suffix=".arrow")
        os.close(descriptor)
        try:
            with _refuse_damage(self.path):
                schema, _, batches = self.read_batches(0)
                with ipc.new_stream(name, schema) as out:
                    rows = 0
                    while (self._limit is None or rows < self._limit) and (batch := next(batches, None)) is not None:
                        out.write_batch(batch)
                        rows += len(batch)
            return ipc.open_stream(memory_map(name)).read_all().slice(0, self._limit)
        finally:
            os.unlink(name)  # the mapping keeps the contents

    def _decode(self, schema: pyarrow.Schema) -> Callable[[Row], Row]:
        """Return a function that parses the objects which `datasets` has written as JSON texts, and drops keys that are
        None because another row has them."""
        has_json = b'"Json"' in (schema.metadata or {}).get(b"huggingface", b"")
        decode = load_features(schema).decode_example if has_json else dict
        return lambda row: {name: _drop_filled(value, schema.field(name).type) for name, value in decode(row).items()}


class _ParquetRows(_TableRows):
    """A parquet file; reading from the middle begins at a row group."""

    def read_batches(self, start: int) -> tuple[pyarrow.Schema, int, Iterator[pyarrow.RecordBatch]]:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(self.path if isinstance(self.path, Path) else self.path.open())
        groups = range(file.metadata.num_row_groups)
        ends = list(accumulate(file.metadata.row_group(i).num_rows for i in groups))
        begin = bisect_right(ends, start)
        batches = file.iter_batches(batch_size=1024, row_groups=groups[begin:])
        return file.schema_arrow, ends[begin - 1] if begin else 0, batches


class _CsvRows(_TableRows):
    """A file of comma-separated values (`.tsv`: tabs) whose first row names the columns. All values are texts."""

    def read_batches(self, start: int) -> tuple[pyarrow.Schema, int, Iterator[pyarrow.RecordBatch]]:
        from pyarrow import csv, string

        reader = csv.open_csv(
            open_binary(self.path),
            csv.ReadOptions(use_threads=False),  # threads do not know a faulty row's number
            csv.ParseOptions(delimiter="\t" if ".tsv" in self.path.suffixes else ",", newlines_in_values=True),
            csv.ConvertOptions(default_column_type=string(), null_values=[""], strings_can_be_null=True),
        )
        return reader.schema, 0, iter(reader)


class _ArrowRows(_TableRows):
    """An Arrow file of either format, mapped if it is local. Each batch is validated before it is read."""

    def read_batches(self, start: int) -> tuple[pyarrow.Schema, int, Iterator[pyarrow.RecordBatch]]:
        import pyarrow
        from pyarrow import ipc

        file = pyarrow.memory_map(str(self.path)) if isinstance(self.path, Path) else self.path.open()
        try:
            reader = ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file_reader = ipc.open_file(file)
            batches = (file_reader.get_batch(i) for i in range(file_reader.num_record_batches))
            return file_reader.schema, 0, map(_validate, batches)
        return reader.schema, 0, map(_validate, reader)

    @cached_property
    def _unpacked(self) -> pyarrow.Table:
        import pyarrow

        with _refuse_damage(self.path):
            schema, _, batches = self.read_batches(0)
            return pyarrow.Table.from_batches(batches, schema).slice(0, self._limit)


def _drop_filled(value: Any, type_: pyarrow.DataType) -> Any:
    """Return a value without keys that are None, in objects of the table; objects from JSON texts are unchanged.

    A message keeps its content, which may be None.
    """
    from pyarrow import types

    if types.is_struct(type_) and isinstance(value, dict):
        fields = {name: type_.field(name).type for name in value}
        said = ("content", "value") if isinstance(value.get("role") or value.get("from"), str) else ()
        return {
            name: _drop_filled(entry, fields[name])
            for name, entry in value.items()
            if entry is not None or name in said
        }
    if types.is_nested(type_) and hasattr(type_, "value_type") and isinstance(value, list):
        return [_drop_filled(item, type_.value_type) for item in value]
    return value


def _validate(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return the batch; pyarrow's error for one whose offsets lead outside of its buffers, which would crash."""
    batch.validate(full=True)
    return batch


@contextmanager
def _refuse_damage(path: DataPath) -> Iterator[None]:
    """Name the file in the errors of a reader: ValueError and OSError, among others."""
    try:
        with explain(path.repository, "dataset") if isinstance(path, HubFile) else nullcontext():
            yield
    except Exception as error:
        from pyarrow import ArrowException  # slow to import, and lines do without

        if isinstance(error, FileNotFoundError | HubError) or not isinstance(
            error, ArrowException | OSError | ValueError | EOFError
        ):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error


RowFile = _JsonLines | _ObjectRows | _TableRows
ReadPosition = tuple[int, int, int]  # number of the file, position in it, number of the row that starts there
START: ReadPosition = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """An unread row: its number, a function that reads it (or raises BadRow), and one that returns its location."""

    number: int
    row: Callable[[], Row]
    where: Callable[[], str]


class FileRows:
    """The rows of several files, one file after the other, numbered from 0; at most the first ``max_samples``."""

    def __init__(self, files: Sequence[RowFile], max_samples: int | None = None) -> None:
        self.files, self._limit = list(files), max_samples
        self._watched = [WatchedFiles([file.path] if isinstance(file.path, Path) else []) for file in self.files]

    @property
    def paths(self) -> list[DataPath]:
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
        return self._ends[-1] if self._limit is None else min(self._ends[-1], self._limit)

    def __getitem__(self, number: int) -> Row:
        file, index = self._find(number)
        self._watched[file].check()
        return self.files[file][index]

    def where(self, number: int) -> str:
        """Return the location of the row for messages, such as FILE:LINE."""
        file, index = self._find(number)
        return self.files[file].where(index)

    def entry(self, number: int) -> SourceRow:
        return SourceRow(number, partial(self.__getitem__, number), partial(self.where, number))

    def read(self, position: ReadPosition = START) -> Iterator[tuple[SourceRow, ReadPosition]]:
        """Yield the rows from ``position`` on, each with the position of the next one. Needs no index and no length."""
        first, start, number = position
        for file in range(first, len(self.files)):
            try:
                for row, where, after in self.files[file].read(start):
                    if number == self._limit:
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


def find_prefix(path: str | Path) -> Path | None:
    """Return the prefix of an indexed dataset from PREFIX.idx or PREFIX.bin; None for any other path."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else None


def open_rows(path: str | Path, max_samples: int | None = None, *, stream: bool = False) -> FileRows:
    """Open the rows of ``path``, at most the first ``max_samples``; the ending decides how.

    `.jsonl`; `.json` (an array of objects, or one object per line); `.csv`; `.tsv`; `.parquet`; `.arrow`; `.txt` (one
    document per line, under the key `text`), each but parquet also compressed (`.gz`, `.zst`, …); a directory written
    by `datasets.save_to_disk`; a pattern (`shards/*.jsonl`), in the order of names; a dataset of the hub or a URL of a
    file, which is downloaded unless it is cached. ``stream``: files of a dataset are downloaded while they are read.
    FileNotFoundError suggests the nearest name. ValueError for any other ending, and for files without rows.
    """
    rows = FileRows([_open(file, max_samples) for file in _find_files(str(path), stream)], max_samples)
    if next(rows.read(), None) is None:
        raise ValueError(f"{path} holds no rows")
    return rows


def _find_files(name: str, stream: bool) -> Sequence[DataPath]:
    if is_url(name) or is_dataset(name):
        return fetch_data(pin_data(name), rows=not stream)
    return [file for path in _match_files(Path(name)) for file in (_list_tables(path) if path.is_dir() else [path])]


def _match_files(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise FileNotFoundError(f"data file {path} does not exist{_suggestion(path)}")
    names = sorted(glob.glob(str(path), recursive=True))
    if not names:
        raise FileNotFoundError(f"no data file matches {path}")
    return [Path(name) for name in names]


def _open(path: DataPath, max_samples: int | None) -> RowFile:
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    packed = bool(endings) and endings[-1] in CODECS
    if isinstance(path, Path):
        with _refuse_damage(path):
            open_regular(path).close()  # the readers of tables would wait for a FIFO
    opener = OPENERS.get("".join(endings[:-1][-1:] if packed else endings[-1:]))
    if opener is None or (packed and opener in (_ParquetRows, _ArrowRows)):
        raise ValueError(
            f"{path}: expected a name that ends in {', '.join(OPENERS)} (texts also in {', '.join(CODECS)}), or a "
            "`datasets` directory"
        )
    return opener(path, max_samples)


def _open_json(path: DataPath, max_samples: int | None) -> RowFile:
    with _refuse_damage(path):
        if read_first_byte(path) != b"[":
            return _JsonLines(path, max_samples)
        content = read_array(path)
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {describe_problem(error)}") from error
    return _ObjectRows(path, rows)


def _list_tables(path: Path) -> list[Path]:
    """List the Arrow files of a directory that `datasets.save_to_disk` has written. ValueError for any other."""
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
    files = read_json_object(path / "state.json").get("_data_files")
    if not isinstance(files, list) or not files:
        raise ValueError(f"{path / 'state.json'} names no `_data_files`")
    names = [file.get("filename") if isinstance(file, dict) else file for file in files]
    return [path / require_inner_name(name, path / "state.json") for name in names]


OPENERS: Mapping[str, Callable[[DataPath, int | None], RowFile]] = {
    ".jsonl": _JsonLines,
    ".ndjson": _JsonLines,
    ".json": _open_json,
    ".csv": _CsvRows,
    ".tsv": _CsvRows,
    ".parquet": _ParquetRows,
    ".arrow": _ArrowRows,
    ".txt": _TextLines,
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
