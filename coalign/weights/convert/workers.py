"""Tasks on numbered files, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

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
            for task in sorted(ready, key=lambda each: each.exception() is not None):
                yield waiting.pop(task), task.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit torch to one thread: copies of a few MiB are slower with several, above all on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
