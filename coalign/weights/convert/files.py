"""Atomic writes and hashes of large files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import IO, Any

import xxhash

CHUNK = 2**20  # bytes read at once; they fit in the processor's cache for hashing
SYNC = 32 * 2**20  # bytes written between two calls of fsync


class HashedFile:
    """A file written from start to end, with its XXH3-128 hash (it detects damage, not forgery).

    ``pool`` syncs written bytes to the disk while the next are computed; otherwise all would be synced at the end.
    """

    def __init__(self, file: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self.file, self.size, self._hash = file, 0, xxhash.xxh3_128()
        self._pool, self._sync, self._sync_end = pool, pool.submit(lambda: None), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self._hash.update(view)
        self.size += len(view)
        if self.size - self._sync_end >= SYNC and self._sync.done():
            self._sync.result()
            self._sync, self._sync_end = self._pool.submit(os.fsync, self.file.fileno()), self.size
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def write_atomically(path: Path) -> Iterator[HashedFile]:
    """Open a file that appears at ``path`` once it is complete and on the disk. An error leaves nothing of it."""
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
    """Return size and hash of a file. It stops early, with those of a part, once ``ended`` is true."""
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while not ended() and (count := file.readinto(buffer)):
            found.update(buffer[:count])
        return {"size": file.tell(), "xxh3_128": found.hexdigest()}


@contextmanager
def hash_in_background(paths: Sequence[Path]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Hash files in a thread while the block runs. The function waits for the sizes and hashes and returns them."""
    ended = Event()
    with ThreadPoolExecutor(1) as pool:
        found = [pool.submit(hash_file, path, ended.is_set) for path in paths]
        try:
            yield lambda: [each.result() for each in found]
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)
