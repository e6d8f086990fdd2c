"""Kills a process in which a function holds the interpreter for too long: its own threads cannot, and it would hang.

A regular expression that backtracks holds the interpreter's lock for hours. So a process of its own, this file as a
script, waits for signs of life. Without one it says so, has the stacks written (faulthandler needs no lock), and kills.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_STANDARD_ERROR = 2
_PAUSE = 1.0  # seconds between two signs of life


class InterpreterWatch:
    """Kills this process if its Python threads stand still for longer than the last ``find_limit()``, in seconds.

    ``what`` names the suspect in the message. Time in which the process is stopped (SIGSTOP) does not count.
    """

    def __init__(self, what: str, find_limit: Callable[[], float]) -> None:
        self._find_limit, self._closed = find_limit, threading.Event()
        faulthandler.register(signal.SIGUSR2, file=_STANDARD_ERROR, all_threads=True)
        command = [sys.executable, "-S", "-P", __file__, str(os.getpid()), what]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        threading.Thread(target=self._beat, name="coalign-interpreter-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _beat(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            while not self._closed.is_set():
                os.write(self._process.stdin.fileno(), f"{self._find_limit()}\n".encode())
                self._closed.wait(_PAUSE)
        self._process.stdin.close()
        self._process.wait()


def watch(pid: int, what: str) -> None:
    """Read limits from standard input until its end; kill the process if none comes within the last one."""
    limit = left = float("inf")
    while left > 0:
        if select.select([0], [], [], _PAUSE)[0]:
            if not (limits := os.read(0, 2**16).split()):
                return
            limit = left = float(limits[-1])
        elif not _is_stopped(pid):
            left -= _PAUSE
    sys.stderr.write(
        f"coalign: {what}, or a function that it calls, has held the interpreter of process {pid} for {limit:g} s (a "
        "regular expression that backtracks, say): the process is killed. Its stacks:\n"
    )
    sys.stderr.flush()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(_PAUSE)
        os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
