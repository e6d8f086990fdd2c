"""Reads the Python stacks of processes of this machine, also of one that hangs in a collective, a lock or C code.

A worker that is busy with a call cannot answer another one, so a signal asks it: faulthandler's handler runs without
the interpreter's lock and writes into a memory file that ends with the process. Linux only (memfd, /proc).
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

_PATIENCE = 5.0  # seconds that a process may take to answer; a stopped one never does
_PAUSE = 0.05  # seconds without a new line, after which a process has finished


@dataclass(frozen=True, slots=True)
class StackFile:
    """Where a process writes its stacks: its id, and the number of a file that it has open."""

    pid: int
    file: int


def listen() -> StackFile:
    """Make this process write the stacks of all its threads at every SIGUSR1."""
    file = os.memfd_create("coalign-stacks")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return StackFile(os.getpid(), file)


def collect_stacks(processes: Mapping[str, StackFile]) -> dict[str, str]:
    """Read the stacks of other processes of this machine, most recent call first; or say why there are none."""
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
    """Add what the processes write to the texts, until they have finished or _PATIENCE is over."""
    deadline = time.monotonic() + _PATIENCE
    while files and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        new = {name: file.read() for name, file in files.items()}
        files = {name: file for name, file in files.items() if new[name] or not texts[name]}
        for name, text in new.items():
            texts[name] += text


def format_own_stacks() -> str:
    """The stacks of this process, most recent call last, with the names of its threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        stacks.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(stacks)
