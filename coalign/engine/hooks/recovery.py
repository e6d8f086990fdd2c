"""Checkpoints in this machine's memory, from which a run goes on after it has lost a process.

They are written like those on disk, but more often, without directories for other programs, and to /dev/shm: there they
outlast every process of the run, the driver included. They do not outlast the machine, and other machines cannot read
them: where a trained model has processes on another node, the newest checkpoint on disk counts.
"""

from __future__ import annotations

import logging
import os
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
from coalign.run_files.checkpoints import RUN, CorruptCheckpoint, find_step, list_left_memory, name_memory_folder
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

log = logging.getLogger(__name__)
KEPT = 2  # one is complete while the next one is written


def open_memory_folder(run: Path) -> Checkpoints:
    """Return the checkpoints in memory of the run in this folder, and delete those of deleted runs.

    Raises PermissionError if they are another user's.
    """
    folder = name_memory_folder(run)
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} would hold checkpoints of {run}, and belongs to another user")
    if not (run / "config.yaml").exists():  # nobody has trained here since the folder was made
        delete_path(folder)
    for left in list_left_memory(folder.parent):
        delete_path(left)
    return Checkpoints(folder, KEPT, hashes=False)


class Recovery(Hook):
    """Writes a checkpoint in memory every ``every`` steps, and restores the newest one after a loss.

    ``every`` 0: there are none, and the newest checkpoint on disk counts. A checkpoint in memory that cannot be written
    is logged, and the run goes on.
    """

    def __init__(self, memory: Checkpoints, disk: Checkpoints, folder: RunFolder, every: int) -> None:
        self.memory = memory
        self.disk = disk
        self.folder = folder
        self.every = every
        self._sink = Sink(f"the checkpoint in memory ({memory.directory}; runtime.save_in_memory_every)")
        memory.on_complete = self._tidy

    def choose(self, engine: Engine, checkpoint: Path | None) -> Path | None:
        """Return ``checkpoint``, or the newest on disk in place of one in memory that a rank's node cannot read."""
        if checkpoint is not None and checkpoint.parent == self.memory.directory and _find_elsewhere(engine):
            return self.disk.find_newest()
        return checkpoint

    def forget_others(self, checkpoint: Path | None) -> None:
        """Delete the checkpoints in memory, unless the run goes on from one of them."""
        if checkpoint is None or checkpoint.parent != self.memory.directory:
            self.memory.clear()

    def begin(self, engine: Engine) -> None:
        """Write the first checkpoint. ValueError if a trained model has processes on another node than the driver."""
        if self.every and (name := _find_elsewhere(engine)):
            raise ValueError(
                f"runtime.save_in_memory_every is {self.every}, and models.{name} has processes on another node than "
                "the driver, which cannot read this one's memory: set it to 0, and `runtime.save_every` to as many "
                "steps as you can bear to lose"
            )
        if self.every and not {*self.memory.steps(), *self.disk.steps()}.intersection({engine.step}):
            self._write(engine)

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        if self.every and engine.progress.healthy and engine.step % self.every == 0 and engine.served == engine.step:
            self._write(engine)

    def before_training(self, engine: Engine) -> None:
        """Wait until the last step's checkpoint is complete, so that at most the current step can be lost."""
        with self._survive():
            self.memory.finish()

    def save_now(self, engine: Engine) -> Path:
        """Write a checkpoint of the last step, unless there is one; return its path. Raises OSError.

        It is on disk where the cluster has several nodes: processes that load it may be on any of them.
        """
        checkpoints = self.memory if len(engine.cluster.nodes) <= 1 else self.disk
        checkpoints.finish()
        if engine.step not in checkpoints.steps():
            self._begin(engine, checkpoints)
            checkpoints.finish()
        return checkpoints.path(engine.step)

    def restore(self, engine: Engine) -> bool:
        for checkpoints in (self.memory, self.disk):
            with suppress(Exception):  # the lost process may have been writing
                checkpoints.settle()
        newest = self.disk.find_newest() if _find_elsewhere(engine) else find_newest(self.memory, self.disk)
        if newest is None:
            return False
        lost = engine.step
        rewind_engine(engine, newest, repeat=True)
        self.folder.cut(engine.step)
        log.warning("continuing from %s; step %d is made again", newest, min(lost, engine.step) + 1)
        return True

    def end(self, engine: Engine) -> None:
        """Free the memory: the last checkpoint is on the disk."""
        self.before_training(engine)
        self.memory.clear()

    def _write(self, engine: Engine) -> None:
        engine.phase("save")
        with self._survive():
            self.memory.finish()
            if name := _find_elsewhere(engine):
                raise OSError(f"models.{name} now has processes on another node than the driver")
            self._begin(engine, self.memory)
        engine.phase("hooks")

    def _tidy(self, step: int) -> None:
        """Delete old checkpoints after one has become complete."""
        with self._sink.survive():
            self.memory.prune(None)

    def _begin(self, engine: Engine, checkpoints: Checkpoints) -> None:
        in_memory = checkpoints is self.memory
        checkpoints.directory.mkdir(mode=0o700 if in_memory else 0o777, exist_ok=True)
        if in_memory and not (link := checkpoints.directory / RUN).is_symlink():
            link.symlink_to(self.folder.path.absolute())
        checkpoints.begin(engine.step, partial(write_engine_state, engine, exports=not in_memory))

    @contextmanager
    def _survive(self) -> Iterator[None]:
        """Log an error instead of raising it, unless a process is lost."""
        try:
            yield
        except WorkerLost:
            raise
        except Exception as problem:
            with self._sink.survive(Exception):
                raise problem


def _find_elsewhere(engine: Engine) -> str | None:
    """Return the name of a trained model that has processes on another node than the driver, if one has."""
    cluster = engine.cluster
    for name in engine.learning:
        if any(placement.node != cluster.driver_node for placement in cluster.placements.get(name, ())):
            return name
    return None


def find_newest(memory: Checkpoints, disk: Checkpoints) -> Path | None:
    """Return the newest checkpoint in memory or on disk that passes verification; of two at one step, that on disk.

    None without any. CorruptCheckpoint if there are some, and all fail.
    """
    on_disk = max(disk.steps(), default=-1)
    if max(memory.steps(), default=-1) > on_disk:
        try:
            in_memory = memory.find_newest()
        except CorruptCheckpoint:
            if on_disk < 0:
                raise
        else:
            if in_memory is not None and find_step(in_memory) > on_disk:
                return in_memory
    return disk.find_newest()
