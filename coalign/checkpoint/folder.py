"""The folders of a run's checkpoints, on the disk and in memory: write them atomically, verify them, delete old ones.

A checkpoint is written to a temporary directory by workers and by a thread, while training goes on. The thread hashes
all files, flushes them, reads them back and renames the directory: a checkpoint is complete or does not exist.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coalign.checkpoint.manifest import MANIFEST, list_steps, verify_checkpoint
from coalign.files import delete_path, delete_report, flush_path, hash_file, move_aside, read_report, write_atomically
from coalign.threads import begin_in_thread

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # checkpoints in memory, each run in a folder `coalign-USER-HASH`
RUN = "run"  # a link in such a folder to the folder of the run
_KEPT_IN_MEMORY = 2  # one is complete while the next one is written
_LEFT_SECONDS = 24 * 3600.0
_POLL_SECONDS = 0.05


class UnfinishedFiles(Protocol):
    """Files and directories of a checkpoint that workers write in the background."""

    paths: list[Path]  # each gets a report (coalign.files.report_written)

    def finish(self) -> None:
        """Wait until nobody writes any more; raise the first error."""
        ...


class _CheckpointWriting:
    """A checkpoint that is being written."""

    def __init__(self, step: int, aside: Path, files: UnfinishedFiles, cleanup: ExitStack) -> None:
        self.step, self.aside, self.files = step, aside, files
        self.cleanup = cleanup  # renames the directory, or deletes it after an error
        self.reported = threading.Event()  # all files are written
        self.cancelled = threading.Event()
        self.done: Future[None]  # ends with the thread that completes the checkpoint


class _Cancelled(Exception):
    """Nobody wants the checkpoint any more."""


class CheckpointFolder:
    """The checkpoints of one run folder: the newest ``keep``, and the best by a metric if one is watched.

    At most one is being written at a time. ``on_complete(step)`` is called for each complete one. Without ``hashes``
    only the sizes of files are noted and verified: for a directory in memory, whose bits do not rot.
    """

    def __init__(self, directory: Path, keep: int, *, hashes: bool = True) -> None:
        self.directory, self.location = directory, str(directory)
        self.keep = keep
        self.hashes = hashes
        self.on_complete: Callable[[int], None] = lambda step: None
        self._writing: _CheckpointWriting | None = None

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending. Their files are not verified."""
        return [step for step in list_steps(self.directory) if (self.path(step) / MANIFEST).exists()]

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def begin(self, step: int, write_files: Callable[[Path], UnfinishedFiles]) -> None:
        """Begin the checkpoint of ``step``; ``write_files(directory)`` writes its files, or has workers write them.

        The previous one must be finished. Raises what ``write_files`` raises; nothing is left behind then.
        """
        assert self._writing is None, "the previous checkpoint is still being written"
        for left in self.directory.glob(".writing-*"):  # by a run that was killed
            delete_path(left)
        with ExitStack() as cleanup:
            aside = cleanup.enter_context(write_atomically(self.path(step)))
            aside.mkdir(parents=True)
            files = write_files(aside)
            self._writing = _CheckpointWriting(step, aside, files, cleanup.pop_all())
        self._writing.done = begin_in_thread(partial(self._complete, self._writing), "coalign-checkpoint")

    def poll(self) -> None:
        """Call `finish` if it would not wait."""
        if self._writing is not None and self._writing.done.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete, if there is one.

        Raises what writing raised (a full disk is an OSError, here or in a worker). Nothing is left behind then, and
        earlier checkpoints stay as they are.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            if not writing.reported.is_set():
                writing.files.finish()
            writing.done.result()
        except Exception:
            writing.cancelled.set()
            writing.done.exception()  # waits
            with suppress(Exception):  # workers that still write would create the directory again
                writing.files.finish()
            delete_path(writing.aside)
            raise
        self.on_complete(writing.step)

    def settle(self) -> None:
        """Complete a checkpoint that is being written, or give it up if a process that writes its files is lost.

        Raises what `finish` raises.
        """
        if self._writing is not None:
            with suppress(Exception):
                self._writing.files.finish()  # waits for the processes that live
            are_written = all(read_report(path) is not None for path in self._writing.files.paths)
            if not self._writing.reported.is_set() and not are_written:
                self._writing.cancelled.set()
        self.finish()

    def abandon(self) -> None:
        """Cancel the checkpoint that is being written."""
        if self._writing is not None:
            self._writing.cancelled.set()

    def write(self, step: int, write_files: Callable[[Path], UnfinishedFiles]) -> Path:
        """Write the checkpoint of ``step`` and wait for it; return its path. Raises what `begin` and `finish` raise."""
        self.begin(step, write_files)
        self.finish()
        return self.path(step)

    def clear(self) -> None:
        """Delete all checkpoints."""
        delete_path(self.directory)

    def _complete(self, writing: _CheckpointWriting) -> None:
        """Seal and verify a checkpoint once its files are written. Runs in a thread."""
        with writing.cleanup:
            self._wait_for_reports(writing)
            self._seal(writing)
        flush_path(self.directory)

    def _wait_for_reports(self, writing: _CheckpointWriting) -> None:
        """Wait until all files are written. OSError if one cannot be; _Cancelled."""
        waiting = [*writing.files.paths]
        while waiting:
            reports = {path: read_report(path) for path in waiting}
            for problem in filter(None, reports.values()):
                raise OSError(problem)
            waiting = [path for path, report in reports.items() if report is None]
            if writing.cancelled.wait(_POLL_SECONDS if waiting else 0):
                raise _Cancelled
        for path in writing.files.paths:
            delete_report(path)
        writing.reported.set()

    def _seal(self, writing: _CheckpointWriting) -> None:
        aside, entries = writing.aside, dict[str, dict[str, Any]]()
        for file in sorted(path for path in aside.rglob("*") if path.is_file()):
            if writing.cancelled.is_set():
                raise _Cancelled
            entries[str(file.relative_to(aside))] = {"size": file.stat().st_size}
            if self.hashes:
                entries[str(file.relative_to(aside))]["sha256"] = hash_file(file)
        (aside / MANIFEST).write_text(json.dumps({"files": entries}, indent=1))
        for path in (*aside.rglob("*"), aside):
            flush_path(path)
        for name in entries:
            _drop_from_memory(aside / name)
        verify_checkpoint(aside)
        # An interrupted `prune` may have left a directory there, or this run before a rollback.
        shutil.rmtree(self.path(writing.step), ignore_errors=True)

    def link_model(self, step: int) -> None:
        """Make `model`, beside the checkpoint folder, a link to the Hugging Face directory of ``step``."""
        link = self.directory.parent / "model"
        with write_atomically(link) as aside:
            aside.symlink_to(os.path.relpath(self.path(step) / "hf", link.parent))

    def prune(self, best: int | None, held: Collection[int] = ()) -> None:
        """Delete all checkpoints but the newest ``keep``, the ``best`` step and those ``held`` for a reader."""
        for step in self.steps()[: -self.keep]:
            if step != best and step not in held:
                # The manifest goes first: a half-deleted directory must not look like a checkpoint.
                (self.path(step) / MANIFEST).unlink()
                shutil.rmtree(self.path(step))

    def list_candidates(self) -> list[int]:
        """Return the steps that a run may go on from; one without a manifest has been damaged."""
        return list_steps(self.directory)

    def fetch(self, step: int) -> Path:
        """Return the path of a checkpoint. Raises CorruptCheckpoint if it does not pass verification."""
        verify_checkpoint(self.path(step))
        return self.path(step)

    def move_later_aside(self, step: int) -> None:
        """Rename the checkpoints after ``step``, from which the run continues."""
        for later in list_steps(self.directory):
            if later > step:
                path = self.path(later)
                log.warning("%s comes after step %d; it is now %s", path, step, move_aside(path))


class MemoryFolder(CheckpointFolder):
    """The checkpoints of a run in this machine's memory, from which it goes on after it has lost a process.

    They outlast every process of the run, the driver included. They do not outlast the machine, and other machines
    cannot read them.
    """

    def __init__(self, run: Path) -> None:
        """Delete what deleted runs have left. Raises PermissionError if the folder is another user's."""
        digest = hashlib.sha256(str(run.absolute()).encode()).hexdigest()
        folder = MEMORY / f"coalign-{os.getuid()}-{digest[:16]}"
        super().__init__(folder, _KEPT_IN_MEMORY, hashes=False)
        self.run = run
        if folder.exists() and folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} would hold checkpoints of {run}, and belongs to another user")
        if not (run / "config.yaml").exists():  # nobody has trained here since the folder was made
            self.clear()
        for left in filter(_is_left, MEMORY.glob(f"coalign-{os.getuid()}-*")):
            delete_path(left)

    def begin(self, step: int, write_files: Callable[[Path], UnfinishedFiles]) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if not (link := self.directory / RUN).is_symlink():
            link.symlink_to(self.run.absolute())
        super().begin(step, write_files)

    def list_candidates(self) -> list[int]:
        return self.steps()  # the others are remains of `clear`


def _is_left(folder: Path) -> bool:
    """Whether a folder in memory is that of a deleted run, and nobody has written to it for a day."""
    try:
        return not (folder / RUN).readlink().exists() and time.time() - folder.stat().st_mtime > _LEFT_SECONDS
    except OSError:  # it has no link, or another process has just deleted it
        return False


def _drop_from_memory(path: Path) -> None:
    """Drop a flushed file from the page cache, so that its next reader reads the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
