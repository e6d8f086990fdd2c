"""Retries calls of services (a reward, a tool) that fail, with growing pauses."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger(__name__)

PATIENCE = 600.0  # seconds for which a failing service is asked again
_BACKOFF = 0.1  # seconds before the first repetition, doubled for each further one
_LONGEST_PAUSE = 60.0  # upper limit of a pause, whatever the backoff or the service asks for
_random = random.Random()  # separate, so the user's `random.seed` keeps its effect

Answer = TypeVar("Answer")


class ServiceError(RuntimeError):
    """A service does not answer, or answers wrongly: the call is repeated after at least ``seconds``."""

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


def draw_pause(attempt: int, seconds: float = 0.0) -> float:
    """Return the seconds before repetition ``attempt`` (from 0): ``seconds`` or the backoff, whichever is more."""
    jitter = _random.uniform(1.0, 1.5)  # so that the workers of a run do not all come back at once
    return min(max(seconds, _BACKOFF * 2 ** min(attempt, 20)) * jitter, _LONGEST_PAUSE)


async def call_service(call: Callable[[], Awaitable[Answer]], patience: float = PATIENCE) -> Answer:
    """Await ``call()`` until it raises no ServiceError, for at most ``patience`` seconds, with growing pauses.

    Raises the last ServiceError then, and any other exception at once.
    """
    end, attempt = time.monotonic() + patience, 0
    while True:
        try:
            return await call()
        except ServiceError as error:
            left = end - time.monotonic()
            if left <= 0:
                raise
            pause = min(draw_pause(attempt, error.seconds), left)
            log.warning("a service fails; the next try is in %.1f s, the last in %.0f s: %s", pause, left, error)
        await asyncio.sleep(pause)
        attempt += 1
