"""Opens data files as bytes, decompressed if need be, within limits: a small file can expand beyond memory."""

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

MAX_LINE = 64 * 2**20  # bytes per row
MAX_ARRAY = 2 * 2**30  # bytes of a file that is one JSON array, which is parsed at once
MAX_RATIO = 200  # a file may decompress to this many times its size,
LEAST_UNPACKED = 64 * 2**20  # and any file to this many bytes
_BLOCK_BYTES = 1 << 20
_MIN_BYTES_PER_BRACKET = 8  # in rows
_MAX_DENSE_BRACKETS = 100_000  # so many may be denser


class _DataBomb(ValueError):
    """A file expands to more than a reader accepts."""


def open_binary(path: DataPath, max_line: int | None = MAX_LINE) -> BinaryIO:
    """Open a file to be read from its beginning on, decompressed if its ending says so (`.gz`, `.bz2`, `.zst`, …).

    Reading raises _DataBomb for a line of more than ``max_line`` bytes, and where a file decompresses to more than 200
    times its size. Raises NotRegularFile for a FIFO, a device or a directory.
    """
    file: BinaryIO = open_regular(path) if isinstance(path, Path) else path.open("rb")
    max_bytes = None
    if (codec := CODECS.get("".join(path.suffixes[-1:]).lower())) is not None:
        import pyarrow

        max_bytes = max(LEAST_UNPACKED, MAX_RATIO * file.seek(0, os.SEEK_END))
        file.seek(0)
        file = cast(BinaryIO, pyarrow.CompressedInputStream(file, codec))
    return io.BufferedReader(_BoundedBytes(file, max_line, max_bytes), _BLOCK_BYTES)


def read_first_byte(path: DataPath) -> bytes:
    """Return the first byte of a text that is no white space and no byte order mark; empty without one."""
    with open_binary(path, None) as file:
        first = file.read(_BLOCK_BYTES).removeprefix(BOM_UTF8).strip()
        while not first and (block := file.read(_BLOCK_BYTES)):
            first = block.strip()
    return first[:1]


def read_array(path: DataPath) -> bytes:
    """Return the content of a file of JSON that is one array. Raises _DataBomb for more than 2 GiB."""
    with open_binary(path, None) as file:
        content = file.read(MAX_ARRAY + 1)
    if len(content) > MAX_ARRAY:
        raise _DataBomb(f"it is an array of more than {MAX_ARRAY:,} bytes; write an object a line, as .jsonl")
    refuse_brackets(content)
    return content


def refuse_brackets(text: bytes) -> None:
    """Raise _DataBomb for JSON that is mostly brackets: each becomes an object of 64 bytes."""
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > _MAX_DENSE_BRACKETS and brackets * _MIN_BYTES_PER_BRACKET > len(text):
        raise _DataBomb(f"it has {brackets:,} brackets in {len(text):,} bytes, more than any row needs")


class _BoundedBytes(io.RawIOBase):
    """The bytes of a file; raises _DataBomb beyond its limits."""

    def __init__(self, file: BinaryIO, max_line: int | None, max_bytes: int | None) -> None:
        self._file, self._max_line, self._max_bytes = file, max_line, max_bytes
        self._read = self._line = 0  # bytes in all, and since the last end of a line

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
            raise _DataBomb(f"it has a line of more than {self._max_line:,} bytes, the most that a row may have")
        if self._max_bytes is not None and self._read > self._max_bytes:
            raise _DataBomb(f"it decompresses to more than {self._max_bytes:,} bytes, {MAX_RATIO} times its size")
        return len(data)
