"""The time that an environment takes for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class Clock:
    """Runs while nobody waits for the policy, and rings once ``seconds`` are over. On one event loop."""

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self.seconds = seconds
        self.used = 0.0
        self._ring = ring
        self._pauses = 0
        self._since = 0.0
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._ended:
            return
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(max(0.0, self.seconds - self.used), self._ring)

    def end(self) -> None:
        """Stop for good."""
        self.stop()
        self._ended = True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.used += asyncio.get_running_loop().time() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stands still within; contexts may overlap."""
        self._pauses += 1
        self.stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self.start()
