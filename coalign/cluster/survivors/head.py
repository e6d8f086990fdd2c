"""Holds a Ray cluster of this machine in a process that outlives drivers: `python -m` this FILE FOLDER SECONDS.

Ray ends with the process that has started it. So a driver has this one start it, and joins like any other. It ends when
FILE, where it writes the address, is deleted, or when no driver has held the lock of FOLDER for SECONDS.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from coalign.run_files.lock import FolderInUse, is_going, is_held, is_locked, lock_file

NAME = ".ray"
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0  # between two looks for a driver
START_SECONDS = 300.0  # how long Ray may take to start
END_SECONDS = 30.0  # and to end
ANSWER_SECONDS = 5.0


class RayHead:
    """The process that holds the Ray cluster of a run; ``address`` is the cluster's."""

    def __init__(self, folder: Path, orphan_seconds: float) -> None:
        """Find it, or start it. OSError if Ray cannot be started."""
        set_environment()
        self._file = folder / NAME
        self._process: subprocess.Popen[bytes] | None = None
        if not self._answers():
            self.end()  # whatever is left of it
            self._start(folder, orphan_seconds)
        self.address = self._file.read_text().split()[0]

    def _answers(self) -> bool:
        """Whether a cluster of this machine is there: a process holds it, and its address is open."""
        if not is_locked(self._file):
            return False
        address, _, machine = self._file.read_text().partition(" ")
        host, _, port = address.rpartition(":")
        if machine != socket.gethostname():
            return False
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except (OSError, ValueError):
            return False
        return True

    def end(self) -> None:
        """End Ray, and wait for it."""
        try:
            held = open(self._file, "rb")  # noqa: SIM115 (the lock, also when the file is deleted)
        except FileNotFoundError:
            return
        with held:
            self._file.unlink(missing_ok=True)
            end = time.monotonic() + END_SECONDS
            while is_held(held) and time.monotonic() < end:
                time.sleep(POLL_SECONDS / 4)
        if self._process is not None:
            self._process.kill()  # what is left of Ray ends with it
            self._process.wait()

    def _start(self, folder: Path, orphan_seconds: float) -> None:
        arguments = [str(self._file.absolute()), str(folder.absolute()), str(orphan_seconds)]
        with tempfile.TemporaryFile() as shown:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                start_new_session=True,  # Ctrl-C is for the driver alone
            )
            end = time.monotonic() + START_SECONDS
            while not (self._file.exists() and self._file.stat().st_size):
                if self._process.poll() is not None or time.monotonic() > end:
                    self._process.kill()
                    shown.seek(0)
                    lines = shown.read().decode(errors="replace").strip().splitlines()
                    raise OSError(f"Ray did not start on this machine: {lines[-1] if lines else 'it said nothing'}")
                time.sleep(0.05)


def set_environment() -> None:
    """Set what Ray and its processes should inherit."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray lowers its workers' priority by default: beside other processes of the machine they would hardly compute.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # a file or a pipe gets no control codes


def _hold_ray(file: Path, folder: Path, orphan_seconds: float) -> None:
    """Start Ray, and hold it until it is not wanted any more."""
    import ray

    try:
        lock = lock_file(file, f"another process holds {file}")
    except FolderInUse:
        return
    ray.init(address="local", include_dashboard=False, namespace="coalign", log_to_driver=False)
    lock.write(f"{ray.get_runtime_context().gcs_address} {socket.gethostname()}".encode())
    lock.flush()
    seen = looked = time.monotonic()
    while (is_wanted := _is_same(file, lock)) and time.monotonic() - seen < orphan_seconds:
        time.sleep(POLL_SECONDS)
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            seen = looked if is_going(folder) else seen
    if is_wanted:
        file.unlink()
    ray.shutdown()
    os._exit(0)  # which frees the lock: whoever waits for it finds nothing left


def _is_same(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    _hold_ray(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
