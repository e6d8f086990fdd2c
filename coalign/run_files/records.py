"""Reads files of lines while a run appends to them: metrics.jsonl, samples.jsonl, log.txt.

A reader goes on at the byte where it ended. A run that is resumed or rolled back replaces a file by a shorter one; then
everything is read again. Lines end at `\\n` alone, and one that is not complete yet is left for the next look.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from coalign.files import open_regular

CHUNK = 1 << 22  # bytes read at once
MAX_LINE = 1 << 24  # bytes; a longer line is read as several damaged records
MAX_NESTING = 100  # lists and objects within each other
LARGEST_STEP = 1 << 53  # the largest integer that JavaScript counts exactly
LARGEST_NUMBER = 1e200  # sums of as many as a file can hold stay finite
_QUOTE = ord('"')
_TEXTS_OR_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.?)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
_TAIL = 64  # bytes before a position that identify the file
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The end of the last read: after ``offset`` bytes of the file with this ``inode``, which end with ``tail``."""

    inode: int = 0
    offset: int = 0
    tail: bytes = b""


START = FilePosition()


@dataclass(frozen=True, slots=True)
class _FileGrowth:
    """The complete ``lines`` that follow a position, without their ends, and the ``position`` after them.

    ``replaced``: the file was replaced, so these lines are its first, and all lines read earlier are void.

    Example: everything that a file holds now.
        lines = [line for growth in follow_growth(path, START) for line in growth.lines]
    """

    lines: list[bytes]
    position: FilePosition
    replaced: bool = False


def read_growth(path: Path, position: FilePosition, chunk: int = CHUNK) -> _FileGrowth:
    """Read the lines added to a file after ``position``: at most ``chunk`` bytes, or one line. A missing file is empty.

    Raises OSError if it cannot be read, or is no regular file.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return _FileGrowth([], START, replaced=position.offset > 0)
    with file:
        inode = os.fstat(file.fileno()).st_ino
        replaced = position.offset > 0 and not _has_position(file, inode, position)
        start = START if replaced else position
        file.seek(start.offset)
        data = file.read(chunk)
        while data and b"\n" not in data and len(data) < MAX_LINE and (more := file.read(chunk)):
            data += more
    # The last byte of an overlong line stands for its end: positions stay right, and nobody parses it.
    data = data[: data.rfind(b"\n") + 1 or len(data) * (len(data) >= MAX_LINE)]
    after = FilePosition(inode, start.offset + len(data), (start.tail + data)[-_TAIL:])
    return _FileGrowth(data[:-1].split(b"\n") if data else [], after, replaced)


def _has_position(file: IO[bytes], inode: int, position: FilePosition) -> bool:
    """Whether a position is one of this file. Inodes are used again, so the bytes before it count, too."""
    file.seek(position.offset - len(position.tail))
    return inode == position.inode and file.read(len(position.tail)) == position.tail


def follow_growth(path: Path, position: FilePosition) -> Iterator[_FileGrowth]:
    """Yield the lines added to a file after ``position``, chunk by chunk, until its end."""
    growth = read_growth(path, position)
    while growth.lines or growth.replaced:
        yield growth
        growth = read_growth(path, growth.position)


def read_end(path: Path, max_bytes: int) -> bytes:
    """Return the last ``max_bytes`` bytes of a file, from the beginning of a line on; empty if it is missing.

    Raises OSError if it cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return b""
    return data[data.find(b"\n") + 1 :] if size > max_bytes else data


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line of metrics.jsonl or samples.jsonl; None if it is damaged, or has no `step`.

    NaN, infinities and numbers beyond the floats become None.
    """
    if line.count(b"[") + line.count(b"{") > MAX_NESTING and _measure_nesting(line) > MAX_NESTING:
        return None
    try:
        record = json.loads(line, parse_constant=lambda _: None, parse_float=_parse_finite)
    except (ValueError, RecursionError):
        return None
    return record if is_record(record) else None


def is_record(value: Any) -> bool:
    """Whether a value is an object that has the number of a step."""
    return type(value) is dict and type(step := value.get("step")) is int and 0 <= step < LARGEST_STEP


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that can be added to others."""
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER


def _parse_finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _measure_nesting(line: bytes) -> int:
    """Return how deep brackets are nested outside of texts."""
    depth = deepest = 0
    for match in _TEXTS_OR_BRACKETS.finditer(line):
        bracket = line[match.start()]
        if bracket != _QUOTE:
            depth += 1 if bracket in b"[{" else -1
            deepest = max(deepest, depth)
    return deepest


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of metrics.jsonl or samples.jsonl in order; damaged and unfinished lines are left out."""
    for growth in follow_growth(path, START):
        if growth.replaced:  # by a run that has just begun
            return
        yield from filter(None, map(parse_record, growth.lines))


def select_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a record as floats (metrics.jsonl writes NaN as null)."""
    return {name: float(value) for name, value in record.items() if isinstance(value, bool) or is_number(value)}


class _FollowedFile(Generic[Value]):
    """Follows a file of lines; ``values`` has the results of ``parse``, at most the newest ``limit``.

    Lines for which it returns None are left out.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Value | None], limit: int | None = None) -> None:
        self.path = path
        self.values: deque[Value] = deque(maxlen=limit)
        self._parse = parse
        self._position = START

    def update(self) -> bool:
        """Read the lines added since the last call; return whether ``values`` may have changed."""
        changed = False
        for growth in follow_growth(self.path, self._position):
            self._position, changed = growth.position, True
            if growth.replaced:
                self.values.clear()
            self.values.extend(value for line in growth.lines if (value := self._parse(line)) is not None)
        return changed


def follow_records(path: Path, limit: int | None = None) -> _FollowedFile[dict[str, Any]]:
    """Follow metrics.jsonl or samples.jsonl: the objects of its lines that have a `step`."""
    return _FollowedFile(path, parse_record, limit)


def follow_text(path: Path, limit: int | None = None) -> _FollowedFile[str]:
    """Follow log.txt."""
    return _FollowedFile(path, lambda line: line.decode(errors="replace"), limit)
