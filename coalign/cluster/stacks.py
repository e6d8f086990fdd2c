"""The Python stacks of a process of this machine, also of one that hangs: in a collective, in a lock, in C code that
holds the interpreter.

A worker that is busy with a call cannot answer another one, so it is asked by a signal: faulthandler's handler runs
without the interpreter and writes into a piece of memory that goes with the process. Linux only (memfd, /proc).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass

_PATIENCE = 5.0  # seconds that a process may take to answer; one that is stopped never does
_PAUSE = 0.05  # seconds without a new line: it has answered


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a process writes its stacks when it is asked: it, and a file that it has open."""

    pid: int
    file: int


def listen() -> Listening:
    """From now on SIGUSR1 makes this process write the stacks of all its threads."""
    file = os.memfd_create("coalign-stacks")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return Listening(os.getpid(), file)


def ask(process: Listening) -> str:
    """The stacks of another process of this machine, most recent call first; or why there are none."""
    try:
        with open(f"/proc/{process.pid}/fd/{process.file}") as answer:
            answer.seek(0, os.SEEK_END)
            os.kill(process.pid, signal.SIGUSR1)
            text, deadline = "", time.monotonic() + _PATIENCE
            while time.monotonic() < deadline:
                time.sleep(_PAUSE)
                more = answer.read()
                if text and not more:
                    break
                text += more
    except (FileNotFoundError, ProcessLookupError):
        return "the process is gone\n"
    return text or f"no answer within {_PATIENCE:g} s: the process is stopped, or waits for a device or a disk\n"


def own() -> str:
    """The stacks of this process, most recent call last, with the names of its threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
