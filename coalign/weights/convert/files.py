"""Files that are written whole or not at all, and known by their hash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import IO, Any

import xxhash

CHUNK = 2**20  # bytes read at a time: they stay in the cache until they are hashed
SYNC = 32 * 2**20  # bytes written before the disk is told


class HashedFile:
    """A file that is written from its beginning to its end, and its XXH3-128 (against damage, not against forgery).

    ``pool`` brings what is written to the disk while the next is made: else all of it is waited for at the end.
    """

    def __init__(self, file: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self.file, self.size, self._hash = file, 0, xxhash.xxh3_128()
        self._pool, self._syncing, self._asked = pool, pool.submit(lambda: None), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self._hash.update(view)
        self.size += len(view)
        if self.size - self._asked >= SYNC and self._syncing.done():
            self._syncing.result()
            self._syncing, self._asked = self._pool.submit(os.fsync, self.file.fileno()), self.size
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    @property
    def hash_file(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def write_atomically(path: Path) -> Iterator[HashedFile]:
    """A file that appears when it is whole and on the disk; after an error nothing of it is left."""
    aside = path.with_name(path.name + ".partial")
    try:
        with open(aside, "wb") as file:
            with ThreadPoolExecutor(1) as pool:
                yield (hashed := HashedFile(file, pool))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    assert path.stat().st_size == hashed.size


def hash_file(path: Path, ended: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Size and hash of a file; of a part of it, if ``ended`` says so."""
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while not ended() and (count := file.readinto(buffer)):
            found.update(buffer[:count])
        return {"size": file.tell(), "xxh3_128": found.hexdigest()}


@contextmanager
def hash_in_background(paths: Sequence[Path]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Sizes and hashes of files, found by a thread while others do something else: asked for, they are waited for."""
    ended = Event()
    with ThreadPoolExecutor(1) as pool:
        found = [pool.submit(hash_file, path, ended.is_set) for path in paths]
        try:
            yield lambda: [each.result() for each in found]
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)
