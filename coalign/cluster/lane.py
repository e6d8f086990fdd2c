"""Threads that never keep the process from ending, even when a task hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]  # must not raise: whoever submits it handles its errors


def in_thread(task: Task) -> None:
    """Run ``task`` beside everything else."""
    threading.Thread(target=task, name="coalign-task", daemon=True).start()


class Lane:
    """One thread that runs its tasks in the order given."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"coalign-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Run ``task`` after all earlier ones."""
        self._tasks.put(task)

    def close(self) -> None:
        """End once the tasks given so far are done."""
        self._tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, or this long.

        A thread that is still freeing tensors while the interpreter goes away aborts the process.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
