"""Gathers calls that arrive at different times into batches for a service that takes many at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class CallBatcher(Generic[Item]):
    """Gathers single calls into batches: ``await batcher(item)`` returns the item's result of ``run(items)``.

    ``run`` returns one result for each item, in order (ValueError for another number). No batch waits to fill: items
    that arrive in the same turn of the event loop, or while ``at_once`` batches run, share a batch of at most ``size``.
    A result that is an exception is raised to its own caller; what ``run`` raises, to all callers of the batch. A batch
    is cancelled once nobody waits for it. Belongs to one event loop.
    """

    def __init__(self, run: Callable[[list[Item]], Awaitable[Sequence[Any]]], *, size: int, at_once: int) -> None:
        self._run, self._size, self._at_once = run, size, at_once
        self._waiting: deque[tuple[Item, asyncio.Future[Any]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Items that are in no batch yet."""
        return len(self._waiting)

    async def __call__(self, item: Item) -> Any:
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._waiting.append((item, result))
        loop.call_soon(self._start)  # after everything else in this turn of the loop
        return await result

    def _start(self) -> None:
        while len(self._running) < self._at_once and (batch := self._next()):
            task = asyncio.get_running_loop().create_task(self._settle(batch))
            self._running.add(task)
            task.add_done_callback(self._start_next)
            _cancel_with_all([result for _, result in batch], task)

    def _next(self) -> list[tuple[Item, asyncio.Future[Any]]]:
        batch = []
        while self._waiting and len(batch) < self._size:
            item, result = self._waiting.popleft()
            if not result.done():  # its caller may have given up meanwhile
                batch.append((item, result))
        return batch

    async def _settle(self, batch: list[tuple[Item, asyncio.Future[Any]]]) -> None:
        try:
            results = await self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} results for {len(batch)} items")
        except Exception as error:
            results = [error] * len(batch)
        for (_, waiting), result in zip(batch, results, strict=True):
            if waiting.done():
                continue
            if isinstance(result, Exception):
                waiting.set_exception(result)
            else:
                waiting.set_result(result)

    def _start_next(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()


def _cancel_with_all(results: list[asyncio.Future[Any]], task: asyncio.Task[None]) -> None:
    left = len(results)

    def count_cancelled(result: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= result.cancelled()
        if not left:
            task.cancel()

    for result in results:
        result.add_done_callback(count_cancelled)
