"""Calls of people's functions while an episode is played."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from coalign.processes.function_process import is_coroutine_function, share_pool
from coalign.threads import CallTimeout, call_in_thread

_DAY = 86400.0  # seconds: the episode's clock cancels what takes too long


async def call_function(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a plain or async function; a plain one runs in a thread, so it may block."""
    if is_coroutine_function(function):
        return await function(*arguments, **keywords)
    return await call_in_thread(function, *arguments, **keywords)


async def call_isolated(
    path: str, function: Any, arguments: Sequence[Any], settings: Mapping[str, Any] | None = None, seconds: float = _DAY
) -> Any:
    """Call the function that a configuration names ``path`` with data, no live objects; ``settings`` are keywords.

    A user's plain function runs in child processes, which may hang or die. Raises what the function raises,
    CallTimeout after ``seconds``, and ProcessDied.
    """
    settings = settings or {}
    if not is_coroutine_function(function) and (pool := share_pool(path, function, settings)):
        return await pool.call(arguments, seconds)
    return await limit_time(call_function(function, *arguments, **settings), seconds)


async def limit_time(call: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Await a call; CallTimeout, which is no TimeoutError of the function's own, after ``seconds``."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if limit.expired():
            raise CallTimeout(seconds) from None
        raise
