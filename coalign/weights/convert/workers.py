"""Work on numbered files in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

POLL = 0.2  # seconds between two looks at how far the others are

_state: Any = None
_done: Any = None


def run(
    work: Callable[..., Any],
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    numbers: list[int],
    processes: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[int, Any]]:
    """(number, `work(number, advance=advance)`) as they are done, in any order.

    Other processes get no ``work`` but make it once each: `make(*arguments)`. The first error ends all, when files that
    are being worked on are finished or given up; processes end with this one, however it ends.
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
            yield from ((waiting.pop(each), each.result()) for each in _in_order(ready))
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Copies of a few MiB are slower with several threads, much slower where others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_order(ready: Iterable[Any]) -> list[Any]:
    """Those that failed last, so that nothing that is done is lost."""
    return sorted(ready, key=lambda each: each.exception() is not None)


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
