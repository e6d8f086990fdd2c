"""The lock of a run folder: one process at a time writes to it, and others can see which, and whether it still goes.

`.lock` is held by flock, which ends with the process, however it ends. Its content says whose the lock is, or was.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from coalign.files import read_json_object

NAME = ".lock"
_LOOK_SECONDS = 0.01  # longer than another process takes to look whether a lock is held


class FolderInUse(OSError):
    """Another process is writing to this file or run folder."""


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that holds the lock of a folder, or was the last to hold it; ``started``: seconds since the epoch."""

    pid: int
    host: str
    started: float


def lock_file(path: Path, message: str) -> IO[bytes]:
    """Open a file, made if needed, and hold its lock until it is closed. Raises FolderInUse(message) if it is locked.

    The file is open for reading and appending.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115 (held by the caller)
    while not _lock(file, fcntl.LOCK_EX):
        if not _lock(file, fcntl.LOCK_SH):
            file.close()
            raise FolderInUse(message)
        fcntl.flock(file, fcntl.LOCK_UN)  # only `is_going` had it, for a moment
        time.sleep(_LOOK_SECONDS)
    return file


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder and hold its lock until the returned file is closed. Raises FolderInUse."""
    file = lock_file(folder / NAME, f"{folder} belongs to a run that is still going; choose another `output`")
    owner = LockOwner(os.getpid(), socket.gethostname(), round(time.time(), 3))
    file.truncate(0)
    file.write(json.dumps(asdict(owner)).encode())
    file.flush()
    return file


def is_going(folder: Path) -> bool:
    """Whether a process holds the lock of this folder: a run, or another command that writes there."""
    try:
        with open(folder / NAME, "rb") as file:
            return not _lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def read_owner(folder: Path) -> LockOwner | None:
    """Return the newest owner of the folder's lock; None if nobody has had it, or it cannot be read."""
    try:
        found = read_json_object(folder / NAME)
        return LockOwner(int(found["pid"]), str(found["host"]), float(found["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
