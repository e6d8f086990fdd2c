"""Large files: writes with hashes, and tasks on numbered files in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import IO, Any

import torch
import xxhash

from coalign.files import write_atomically

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
def write_hashed(path: Path) -> Iterator[HashedFile]:
    """Open a file that appears at ``path`` once it is complete and on the disk. An error leaves nothing of it."""
    with write_atomically(path, flush=True) as aside, open(aside, "wb") as file, ThreadPoolExecutor(1) as pool:
        yield (hashed := HashedFile(file, pool))
    assert path.stat().st_size == hashed.size


def hash_file(path: Path, ended: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Return size and hash of a file. Once ``ended`` is true, it returns those of the bytes that it has read."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while not ended() and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
        return {"size": file.tell(), "xxh3_128": digest.hexdigest()}


@contextmanager
def hash_in_background(paths: Sequence[Path]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Hash files in a thread while the block runs. The function waits for the sizes and hashes and returns them."""
    ended = Event()
    with ThreadPoolExecutor(1) as pool:
        tasks = [pool.submit(hash_file, path, ended.is_set) for path in paths]
        try:
            yield lambda: [task.result() for task in tasks]
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)


POLL = 0.2  # seconds between two reports of progress

_state: Any = None
_done: Any = None


def run_tasks(
    work: Callable[..., Any],
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    numbers: list[int],
    processes: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[int, Any]]:
    """Yield (number, `work(number, advance=advance)`) as tasks finish, in any order.

    Other processes do not receive ``work``: each makes its own with `make(*arguments)`. The first error ends the run
    after the current tasks. The processes end with this one, even if it is killed.
    """
    if processes == 1 or len(numbers) < 2:
        yield from ((number, work(number, advance=advance)) for number in numbers)
        return
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    seen = 0
    pool = ProcessPoolExecutor(min(processes, len(numbers)), context, _begin, (done, make, arguments))
    try:
        waiting = {pool.submit(_work, number): number for number in numbers}
        while waiting:
            ready, _ = wait(waiting, POLL, FIRST_COMPLETED)
            advance(done.value - seen)
            seen = done.value
            # Failed tasks come last, so that no finished one is lost.
            for task in sorted(ready, key=lambda future: future.exception() is not None):
                yield waiting.pop(task), task.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit torch to one thread: copies of a few MiB are slower with several, above all on busy cores."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _begin(done: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _state, _done
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    _done, _state = done, make(*arguments)


def _work(number: int) -> Any:
    def advance(n: int) -> None:
        with _done.get_lock():
            _done.value += n

    return _state(number, advance=advance)
