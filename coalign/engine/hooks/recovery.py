"""Checkpoints in this machine's memory, from which a run goes on after it has lost a process.

They are written like those on disk, but often, without directories for other programs, and to /dev/shm: there they
outlast every process of the run, the driver included. They do not outlast the machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coalign.cluster.future import WorkerLost
from coalign.engine.engine import Hook
from coalign.engine.hooks.checkpoint import rewind_engine, write_engine_state
from coalign.engine.hooks.checkpoint_folder import Checkpoints
from coalign.engine.hooks.run_folder import RunFolder
from coalign.files import Sink, delete_path
from coalign.run_files.checkpoints import MEMORY, RUN, CorruptCheckpoint, find_step
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)
KEPT = 2  # one is complete while the next one is written
LEFT_SECONDS = 24 * 3600.0


def open_memory_folder(run: Path) -> Checkpoints:
    """Return the checkpoints in memory of the run in this folder, none of a deleted one that had the same path.

    Raises PermissionError if they are another user's.
    """
    digest = hashlib.sha256(str(run.absolute()).encode()).hexdigest()
    folder = MEMORY / f"coalign-{os.getuid()}-{digest[:16]}"
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} would hold checkpoints of {run}, and belongs to another user")
    if not (run / "config.yaml").exists():  # nobody has trained here since the folder was made
        delete_path(folder)
    for other in MEMORY.glob(f"coalign-{os.getuid()}-*"):
        if _is_left(other):
            delete_path(other)
    return Checkpoints(folder, KEPT, hashes=False)


def _is_left(folder: Path) -> bool:
    """Whether a folder in memory is of a run that was deleted, and nobody has written to it for a day."""
    try:
        return not (folder / RUN).readlink().exists() and time.time() - folder.stat().st_mtime > LEFT_SECONDS
    except OSError:  # it has no link, or another process has just deleted it
        return False


class Recovery(Hook):
    """Keeps checkpoints in memory, one every ``every`` steps, and takes the run back to the newest one.

    ``every`` 0: there are none, and the newest checkpoint on disk counts. One in memory that cannot be written is
    logged, and the run goes on.
    """

    def __init__(self, memory: Checkpoints, disk: Checkpoints, folder: RunFolder, every: int) -> None:
        self.memory = memory
        self.disk = disk
        self.folder = folder
        self.every = every
        self._sink = Sink(f"the checkpoint in memory ({memory.directory}; runtime.save_in_memory_every)")
        memory.on_complete = lambda step: memory.prune(None)

    def forget_others(self, checkpoint: Path | None) -> None:
        """Delete what is in memory, unless the run goes on from there."""
        if checkpoint is None or checkpoint.parent != self.memory.directory:
            delete_path(self.memory.directory)

    def begin(self, engine: Engine) -> None:
        """Write the first checkpoint. ValueError if a trained model has processes on another machine."""
        cluster = engine.cluster
        nodes = {place.node for name in engine.learning for place in cluster.placements.get(name, ())}
        if self.every and nodes.difference({cluster.own_node}):
            others = ", ".join(cluster.nodes[node].name for node in sorted(nodes.difference({cluster.own_node})))
            raise ValueError(
                f"runtime.save_in_memory_every is {self.every}, and trained models have processes on {others}: a "
                "checkpoint in memory has to be on the driver's machine; set it to 0, and save_every to a few steps"
            )
        if self.every and not {*self.memory.steps(), *self.disk.steps()}.intersection({engine.step}):
            self._write(engine)

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if self.every and engine.healthy and engine.step % self.every == 0 and engine.served == engine.step:
            self._write(engine)

    def before_training(self, engine: Engine) -> None:
        """Wait until the last step's checkpoint is complete, so that at most the step that begins can be lost."""
        with self._survive():
            self.memory.finish()

    def save_now(self, engine: Engine) -> Path:
        """Write a checkpoint of the last step, unless there is one; return its path. Raises OSError."""
        self.memory.finish()
        if engine.step not in self.memory.steps():
            self._begin(engine)
            self.memory.finish()
        return self.memory.path(engine.step)

    def restore(self, engine: Engine) -> bool:
        for each in (self.memory, self.disk):
            with suppress(Exception):  # the lost process may have been writing
                each.settle()
        newest = find_newest(self.memory, self.disk)
        if newest is None:
            return False
        lost = engine.step
        rewind_engine(engine, newest, repeat=True)
        self.folder.cut(engine.step)
        log.warning("continuing from %s; step %d is made again", newest, min(lost, engine.step) + 1)
        return True

    def end(self, engine: Engine) -> None:
        """Free the memory: what the run has made is on the disk."""
        self.before_training(engine)
        delete_path(self.memory.directory)

    def _write(self, engine: Engine) -> None:
        engine.phase("save")
        with self._survive():
            self.memory.finish()
            self._begin(engine)
        engine.phase("hooks")

    def _begin(self, engine: Engine) -> None:
        self.memory.directory.mkdir(mode=0o700, exist_ok=True)
        if not (link := self.memory.directory / RUN).is_symlink():
            link.symlink_to(self.folder.path.absolute())
        self.memory.begin(engine.step, partial(write_engine_state, engine, exports=False))

    @contextmanager
    def _survive(self) -> Iterator[None]:
        """Log an error in place of raising it, unless a process is lost."""
        lost: WorkerLost | None = None
        with self._sink.survive(Exception):
            try:
                yield
            except WorkerLost as error:
                lost = error
        if lost is not None:
            raise lost


def find_newest(memory: Checkpoints, disk: Checkpoints) -> Path | None:
    """Return the newest checkpoint in memory or on disk that passes verification; of the same step that on disk.

    None without any. CorruptCheckpoint if there are some, and all fail.
    """
    on_disk = max(disk.steps(), default=-1)
    if max(memory.steps(), default=-1) > on_disk:
        try:
            found = memory.find_newest()
        except CorruptCheckpoint:
            if on_disk < 0:
                raise
        else:
            if found is not None and find_step(found) > on_disk:
                return found
    return disk.find_newest()
