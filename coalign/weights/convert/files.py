"""Files that are written whole or not at all, and known by their hash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

CHUNK = 8 * 2**20  # bytes read at a time


class Hashed:
    """A file that is written from its beginning to its end, and its XXH3-128 (against damage, not against forgery)."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self._hash = file, 0, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[Hashed]:
    """A file that appears when it is whole and on the disk; after an error nothing of it is left."""
    aside = path.with_name(path.name + ".partial")
    try:
        with open(aside, "wb", buffering=0) as file:
            yield (hashed := Hashed(file))
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    assert path.stat().st_size == hashed.size


def digest(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    found = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHUNK):
            found.update(data)
        return {"size": file.tell(), "xxh3_128": found.hexdigest()}
