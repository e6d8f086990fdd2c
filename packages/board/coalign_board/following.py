"""Reads files of lines while a run appends to them: metrics.jsonl, samples.jsonl, log.txt.

A reader goes on at the byte where it ended. A run that is resumed or rolled back replaces a file by a shorter one; then
everything is read again. Lines end at `\\n` alone, and one that is not complete yet is left for the next look.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from coalign.files import open_regular
from coalign.run_files.records import MAX_LINE, parse_record

CHUNK = 1 << 22  # bytes read at once
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
