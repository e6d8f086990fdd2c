"""Calls of plain functions that an event loop can wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What the function returns or raises, from a thread of its own.

    A thread cannot be stopped: one that nobody waits for any more is left to itself, and ends with the process.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return  # cancelled
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result = error = None
        try:
            result = function(*arguments, **keywords)
        except BaseException as raised:
            error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"environment:{getattr(function, '__name__', '')}", daemon=True).start()
    return await outcome
