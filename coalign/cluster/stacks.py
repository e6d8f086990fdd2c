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
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TextIO

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


def ask(processes: Mapping[str, Listening]) -> dict[str, str]:
    """The stacks of other processes of this machine, most recent call first; or why there are none."""
    with ExitStack() as stack:
        texts, files = {}, {}
        for name, process in processes.items():
            try:
                files[name] = stack.enter_context(open(f"/proc/{process.pid}/fd/{process.file}"))
                files[name].seek(0, os.SEEK_END)
                os.kill(process.pid, signal.SIGUSR1)
                texts[name] = ""
            except (FileNotFoundError, ProcessLookupError):
                texts[name] = "the process is gone\n"
        _read(files, texts)
    return {name: text or "no answer: the process is stopped, or deep in the kernel\n" for name, text in texts.items()}


def _read(files: dict[str, TextIO], texts: dict[str, str]) -> None:
    """Add what comes to the texts, until nobody writes any more or _PATIENCE is over."""
    deadline = time.monotonic() + _PATIENCE
    while files and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        new = {name: file.read() for name, file in files.items()}
        files = {name: file for name, file in files.items() if new[name] or not texts[name]}
        for name, text in new.items():
            texts[name] += text


def own() -> str:
    """The stacks of this process, most recent call last, with the names of its threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
