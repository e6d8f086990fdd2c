"""Runs a plain function on many arguments in a few threads, with a deadline for each call.

A thread that hangs cannot be stopped: it is left behind, counted, and another one goes on with the remaining calls.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Settled = tuple[Any, BaseException | None]  # what a call returned, or what it raised

_THREADS = min(32, (os.cpu_count() or 1) + 4)  # enough to overlap some waiting
MAX_HUNG = 16  # threads that did not come back and still run


class OutOfTime(Exception):
    """Our deadline, as against a TimeoutError that the function raised itself."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")


class TooManyHung(RuntimeError):
    """Threads keep hanging."""


@dataclass
class _Work:
    """Calls that several threads share: those still to do, and the results by their place."""

    call: Callable[[Any], Any]
    todo: deque[tuple[int, Any]]
    results: dict[int, Settled]


@dataclass
class _Worker:
    """One thread. ``place`` and ``since`` are those of the call it is in; all of it under ``lock``."""

    work: _Work
    finished: Callable[[], Any]
    place: int = -1
    since: float = 0.0
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        settled: Settled | None = None
        while (job := self._next(settled)) is not None:
            try:
                settled = self.work.call(job), None
            except BaseException as error:  # SystemExit too: a reward cannot end the run by calling exit()
                settled = None, error
        if not self.abandoned:
            self.finished()

    def give_up(self, seconds: float) -> bool:
        """Leave the thread behind if its call has taken longer than that."""
        with self.lock:
            self.abandoned = time.monotonic() - self.since >= seconds
            return self.abandoned

    def _next(self, settled: Settled | None) -> Any | None:
        with self.lock:
            if self.abandoned:
                return None
            if settled is not None:
                self.work.results[self.place] = settled
            try:
                self.place, argument = self.work.todo.popleft()
            except IndexError:
                return None
            self.since = time.monotonic()
            return argument


class ThreadPool:
    """Threads for plain functions; belongs to one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_THREADS)
        self._hung: list[threading.Thread] = []

    async def run(self, call: Callable[[Any], Any], arguments: Sequence[Any], seconds: float) -> list[Settled]:
        """The outcome of every call, in order; a call that takes longer than ``seconds`` has raised OutOfTime.

        Raises TooManyHung when more than MAX_HUNG threads hang.
        """
        work = _Work(call, deque(enumerate(arguments)), {})
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_THREADS, len(arguments))):
                group.create_task(self._lane(work, seconds))
        return [work.results[place] for place in range(len(arguments))]

    async def _lane(self, work: _Work, seconds: float) -> None:
        async with self._free:
            while work.todo:
                await self._one_thread(work, seconds)

    async def _one_thread(self, work: _Work, seconds: float) -> None:
        """Start a thread and see it to its end, or to the call it hangs in."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        worker = _Worker(work, lambda: loop.call_soon_threadsafe(ended.set), since=time.monotonic())
        # A daemon, not a pool's: the process need not wait for it when it ends.
        thread = threading.Thread(target=worker.run, name="reward", daemon=True)
        thread.start()
        try:
            while not ended.is_set():
                left = worker.since + seconds - time.monotonic()
                try:
                    await asyncio.wait_for(ended.wait(), max(left, 0.001))
                except TimeoutError:
                    if worker.give_up(seconds):
                        work.results[worker.place] = None, OutOfTime(seconds)
                        self._count(thread)
                        return
        finally:
            worker.abandoned = True  # if this was cancelled, nobody waits for the thread any more

    def _count(self, thread: threading.Thread) -> None:
        self._hung = [*(t for t in self._hung if t.is_alive()), thread]
        if len(self._hung) > MAX_HUNG:
            raise TooManyHung(f"{len(self._hung)} threads of reward functions did not return in time and still run")
