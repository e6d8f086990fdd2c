"""vLLM's processes for the ranks of a replica, watched: which one ended first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any


class WorkerProcesses:
    """``workers``: vLLM's handles. As soon as one process ends vLLM ends the others, and then all of them are gone."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self._first: Any = None
        threading.Thread(target=self._watch, name="vllm-workers", daemon=True).start()

    def _watch(self) -> None:
        ended = connection.wait([worker.proc.sentinel for worker in self._workers])
        self._first = next(worker for worker in self._workers if worker.proc.sentinel in ended)

    @property
    def lost(self) -> str | None:
        """What to say of the process that ended, if one did."""
        if self._first is None:
            return None
        rank, process = self._first.rank, self._first.proc
        process.join(1)
        return f"vLLM's process of rank {rank} of {len(self._workers)} (pid {process.pid}) {_how(process.exitcode)}"


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return "ended" if code is None else f"ended with code {code}"
    hint = " (as the system does when memory is short)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
