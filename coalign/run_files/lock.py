"""The lock of a run folder: one process at a time writes to it, and others can see which one, and whether it runs.

`.lock` is held by flock, which ends with the process, however it ends. Its content names the owner, or the last one.
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

from coalign.files import open_regular, read_json_object

NAME = ".lock"
_MAX_TIME = 1e11  # seconds since the epoch, some thousand years from now
_RETRY_SECONDS = 0.01  # longer than `is_going` of another process holds the lock


class FolderInUse(OSError):
    """Another process is writing to this file or run folder."""


@dataclass(frozen=True, slots=True)
class _LockOwner:
    """The process that holds the lock of a folder, or was the last to hold it; ``started``: seconds since the epoch.

    ``epoch`` counts the owners of the lock, this one included.
    """

    pid: int
    host: str
    started: float
    epoch: int = 1

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine, whose end its lock tells."""
        return self.host == socket.gethostname()


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
        time.sleep(_RETRY_SECONDS)
    return file


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder and hold its lock until the returned file is closed. Raises FolderInUse."""
    file = lock_file(folder / NAME, f"{folder} belongs to a run that is still going; choose another `output`")
    previous = read_owner(folder)
    epoch = previous.epoch + 1 if previous else 1
    owner = _LockOwner(os.getpid(), socket.gethostname(), round(time.time(), 3), epoch)
    file.truncate(0)
    file.write(json.dumps(asdict(owner)).encode())
    file.flush()
    return file


def is_going(folder: Path) -> bool:
    """Whether a process holds the lock of this folder: a run, or another command that writes there."""
    return is_locked(folder / NAME)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file."""
    try:
        with open_regular(path) as file:
            return is_held(file)
    except FileNotFoundError:
        return False


def is_held(file: IO[bytes]) -> bool:
    """Whether another process holds the lock of this open file."""
    if not _lock(file, fcntl.LOCK_SH):
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def read_owner(folder: Path) -> _LockOwner | None:
    """Return the newest owner of the folder's lock; None if nobody has had it, or it cannot be read."""
    try:
        content = read_json_object(folder / NAME)
        started = float(content["started"])
        if not 0 <= started < _MAX_TIME:
            return None
        return _LockOwner(int(content["pid"]), str(content["host"]), started, int(content.get("epoch", 1)))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _lock(file: IO[bytes], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
