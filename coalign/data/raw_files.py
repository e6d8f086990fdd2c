"""Opens data files as bytes, decompressed if need be, with limits: few bytes can stand for more than memory holds."""

from __future__ import annotations

import io
import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from coalign.files import open_regular
from coalign.hub_data import CODECS

if TYPE_CHECKING:
    from coalign.hub import HubFile

    DataPath = Path | HubFile

MAX_LINE = 64 * 2**20  # bytes of a row's line
MAX_ARRAY = 2 * 2**30  # bytes of a file that is one JSON array, which is parsed in one go
MAX_RATIO, LEAST_UNPACKED = 200, 64 * 2**20  # by how much a file may grow, and bytes to which any may
_BLOCK = 1 << 20
_DENSE, _FEW = 8, 100_000  # bytes that a bracket stands for in rows, at least; so many brackets may be denser


class DataBomb(ValueError):
    """A file stands for more than a reader is willing to hold."""


def open_binary(path: DataPath, max_line: int | None = MAX_LINE) -> BinaryIO:
    """Open a file to be read from its beginning on, decompressed if its ending says so (`.gz`, `.bz2`, `.zst`, …).

    Reading raises DataBomb for a line of more than ``max_line`` bytes, and where a file decompresses to more than 200
    times its size. Raises NotRegularFile for a FIFO, a device or a directory.
    """
    file: BinaryIO = open_regular(path) if isinstance(path, Path) else path.open("rb")
    most = None
    if (codec := CODECS.get("".join(path.suffixes[-1:]).lower())) is not None:
        import pyarrow

        most = max(LEAST_UNPACKED, MAX_RATIO * file.seek(0, os.SEEK_END))
        file.seek(0)
        file = cast(BinaryIO, pyarrow.CompressedInputStream(file, codec))
    return io.BufferedReader(_BoundedBytes(file, max_line, most), _BLOCK)


def read_first_byte(path: DataPath) -> bytes:
    """Return the first byte of a text that is no white space and no byte order mark; empty without one."""
    with open_binary(path, None) as file:
        first = file.read(_BLOCK).removeprefix(BOM_UTF8).strip()
        while not first and (block := file.read(_BLOCK)):
            first = block.strip()
    return first[:1]


def read_array(path: DataPath) -> bytes:
    """Return the content of a file of JSON that is one array. Raises DataBomb for more than 2 GiB."""
    with open_binary(path, None) as file:
        content = file.read(MAX_ARRAY + 1)
    if len(content) > MAX_ARRAY:
        raise DataBomb(f"it is an array of more than {MAX_ARRAY:,} bytes; write an object a line, as .jsonl")
    refuse_brackets(content)
    return content


def refuse_brackets(text: bytes) -> None:
    """Raise DataBomb for JSON that is mostly brackets: each becomes an object of 64 bytes."""
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > _FEW and brackets * _DENSE > len(text):
        raise DataBomb(f"it has {brackets:,} brackets in {len(text):,} bytes, more than any row needs")


class _BoundedBytes(io.RawIOBase):
    """The bytes of a file; raises DataBomb beyond its limits."""

    def __init__(self, file: BinaryIO, max_line: int | None, most: int | None) -> None:
        self._file, self._max_line, self._most = file, max_line, most
        self._read = self._line = 0  # bytes, and those since the last end of a line

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._line = 0
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._read += len(data)
        end = data.rfind(b"\n")
        self._line = len(data) - end - 1 if end >= 0 else self._line + len(data)
        if self._max_line is not None and self._line > self._max_line:
            raise DataBomb(f"it has a line of more than {self._max_line:,} bytes, the most that a row may have")
        if self._most is not None and self._read > self._most:
            raise DataBomb(f"it decompresses to more than {self._most:,} bytes, {MAX_RATIO} times its size")
        return len(data)
