"""Calls plain functions in a few threads, with a deadline for each call.

Python cannot stop a thread, so one that hangs is left behind and ends with the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coalign.processes.host import count_processors
from coalign.threads import CallResult, CallTimeout, start_thread, try_call

_THREADS = min(32, count_processors() + 4)  # enough to overlap some waiting
MAX_HUNG = 16  # threads that missed their deadline and still run


class TooManyHung(RuntimeError):
    """More than MAX_HUNG threads missed their deadline and still run."""


class ThreadPool:
    """Runs plain functions in a few threads, with a deadline for each call. Belongs to one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_THREADS)
        self._hung: list[threading.Thread] = []

    async def run(self, call: Callable[[Any], Any], arguments: Sequence[Any], seconds: float) -> list[CallResult]:
        """The result of every call, in order; a call that takes longer than ``seconds`` has raised CallTimeout.

        A thread that hangs is abandoned, and another one makes the remaining calls. Raises TooManyHung (in an
        ExceptionGroup) when more than MAX_HUNG threads hang.
        """
        work = _SharedCalls(call, deque(enumerate(arguments)))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_THREADS, len(arguments))):
                group.create_task(self._work_off(work, seconds))
        return [work.results[position] for position in range(len(arguments))]

    async def _work_off(self, work: _SharedCalls, seconds: float) -> None:
        async with self._free:
            while work.todo:
                await self._run_worker(work, seconds)

    async def _run_worker(self, work: _SharedCalls, seconds: float) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        worker = _Worker(work, lambda: loop.call_soon_threadsafe(ended.set), since=time.monotonic())
        thread = start_thread(worker.run, "pool")
        try:
            while not ended.is_set():
                left = worker.since + seconds - time.monotonic()
                try:
                    await asyncio.wait_for(ended.wait(), max(left, 0.001))
                except TimeoutError:
                    if worker.abandon_after(seconds):
                        work.results[worker.position] = None, CallTimeout(seconds)
                        self._count_hung(thread)
                        return
        finally:
            worker.abandoned = True  # if this task was cancelled, nobody waits for the thread any more

    def _count_hung(self, thread: threading.Thread) -> None:
        self._hung = [*(t for t in self._hung if t.is_alive()), thread]
        if len(self._hung) > MAX_HUNG:
            raise TooManyHung(f"{len(self._hung)} threads did not return in time and still run")


@dataclass
class _SharedCalls:
    """Calls that several threads take from: those still to make, and the results by position."""

    call: Callable[[Any], Any]
    todo: deque[tuple[int, Any]]
    results: dict[int, CallResult] = field(default_factory=dict)


@dataclass
class _Worker:
    """One thread's work. ``position`` and ``since`` are those of its current call; all fields are under ``lock``."""

    work: _SharedCalls
    report_end: Callable[[], Any]
    since: float
    position: int = -1
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        result: CallResult | None = None
        while (job := self._next(result)) is not None:
            result = try_call(partial(self.work.call, *job))
        if not self.abandoned:
            self.report_end()

    def abandon_after(self, seconds: float) -> bool:
        """Abandon the thread if its current call has taken ``seconds``; whether it has."""
        with self.lock:
            self.abandoned = time.monotonic() - self.since >= seconds
            return self.abandoned

    def _next(self, result: CallResult | None) -> tuple[Any] | None:
        """Store the last call's result; the argument of the next call, None at the end."""
        with self.lock:
            if self.abandoned:
                return None
            if result is not None:
                self.work.results[self.position] = result
            try:
                self.position, argument = self.work.todo.popleft()
            except IndexError:
                return None
            self.since = time.monotonic()
            return (argument,)
