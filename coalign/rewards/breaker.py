"""A circuit breaker: stops calling what does not answer, and tries again after a pause."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Closed, it admits every call. ``failures`` in a row open it: it admits none for ``pause`` seconds, then a single
    trial (half-open), whose outcome closes it or opens it again. ``clock`` in seconds."""

    def __init__(self, failures: int, pause: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._pause, self._clock = failures, pause, clock
        self._until: float | None = None  # open until then; None: closed
        self._trying = False
        self.streak = 0
        self.last = ""

    @property
    def left(self) -> float:
        """Seconds until a call is let through; 0.0 if one is now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def admits(self) -> bool:
        """Whether a call may be made now. Each call that was admitted must end in ``succeeded`` or ``failed``."""
        if self._until is None:
            return True
        if self._trying or self.left:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self.streak, self._until, self._trying = 0, None, False

    def failed(self, why: str) -> bool:
        """Count a failure; whether the breaker is open now."""
        self.streak, self.last = self.streak + 1, why
        if self._trying or self.streak >= self._limit:
            self._until = self._clock() + self._pause
        self._trying = False
        return self._until is not None
