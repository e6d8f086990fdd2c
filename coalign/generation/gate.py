"""Lets other threads hold the engine between two tokens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """A step runs only while nobody holds the gate; ``hold`` returns once no step is running. Holds nest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holds = 0
        self._stepping = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._holds == 0)
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def hold(self) -> None:
        with self._changed:
            self._holds += 1
            self._changed.wait_for(lambda: not self._stepping)

    def release(self) -> None:
        """Undo one ``hold``; RuntimeError without one."""
        with self._changed:
            if not self._holds:
                raise RuntimeError("resume without pause")
            self._holds -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()
