"""Checkpoints in this machine's memory, from which a run goes on after it has lost a process.

They are written like those on disk, but more often, without directories for other programs, and to /dev/shm: there they
outlast every process of the run, the driver included. They do not outlast the machine. On a Ray cluster of several
nodes another node also holds each node's files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coalign.cluster.cluster import choose_cluster, join_keepers
from coalign.cluster.future import Call, WorkerFailure, WorkerLost
from coalign.cluster.survivors.keeper import KeeperLost, has_keepers
from coalign.engine.engine import Hook
from coalign.engine.hooks.checkpoint import MODELS, rewind_engine, write_engine_state
from coalign.engine.hooks.checkpoint_folder import Checkpoints, CheckpointWriting, UnfinishedFiles
from coalign.engine.hooks.run_folder import RunFolder
from coalign.files import Sink, delete_path
from coalign.run_files.checkpoints import (
    MANIFEST,
    RUN,
    CorruptCheckpoint,
    find_step,
    list_left_memory,
    name_memory_folder,
)
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.cluster.survivors.keepers import Keepers
    from coalign.config.schema import RuntimeConfig
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


@contextmanager
def find_memory(memory: Checkpoints, run: Path, config: RuntimeConfig) -> Iterator[Checkpoints]:
    """Yield the run's checkpoints in memory before it has a cluster: in this machine's ``memory``, or in that of nodes.

    ValueError if the Ray cluster of the nodes does not answer.
    """
    if has_keepers(run) and config.ray_address is not None and config.resume == "auto":
        with join_keepers(config.ray_address, run, config.call_timeout) as keepers:
            yield NodeCheckpoints(keepers, memory)
    else:
        yield memory


class NodeCheckpoints(Checkpoints):
    """Checkpoints in the memory of several nodes. Each node has the files written there, and those of another node.

    ``directory`` is on this node, where the driver writes its small files. A path in it stands for one on each node
    (``Cluster.localize``).
    """

    def __init__(self, keepers: Keepers, memory: Checkpoints) -> None:
        """Move the checkpoints in this machine's ``memory`` to the nodes' folder."""
        super().__init__(keepers.folder, memory.keep, hashes=False)
        self.keepers = keepers
        if memory.directory.exists():
            self.directory.mkdir(mode=0o700, exist_ok=True)
            for step in memory.steps():
                if not self.path(step).exists():
                    memory.path(step).rename(self.path(step))
            memory.clear()

    def steps(self) -> list[int]:
        return [*self.keepers.list_steps()]

    def begin(self, step: int, write_files: Callable[[Path], UnfinishedFiles | None]) -> None:
        self.keepers.open()
        super().begin(step, write_files)

    def find_newest(self) -> Path | None:
        """Return the newest checkpoint of which living nodes hold all files, after fetching the driver's files.

        CorruptCheckpoint if there are some and none is complete. Raises OSError, KeeperLost.
        """
        problems = []
        for step, spread in reversed(self.keepers.list_steps().items()):
            if not spread.lost:
                return self.keepers.fetch_state(step, MODELS)
            lost = spread.lost
            problems.append(f"step {step}: no node that lives holds {lost[0]}, one of {len(lost)} files")
            log.warning("of the checkpoint in memory of %s; trying the one before", problems[-1])
        if problems:
            raise CorruptCheckpoint(f"no checkpoint in memory is whole ({'; '.join(problems)})")
        return None

    def prune(self, best: int | None, held: Collection[int] = ()) -> None:
        self.keepers.keep(self.steps()[-self.keep :])

    def clear(self) -> None:
        self.keepers.clear()

    def _seal(self, writing: CheckpointWriting) -> None:
        manifest = self.keepers.copy(writing.aside, writing.step)
        (writing.aside / MANIFEST).write_text(manifest)
        delete_path(self.path(writing.step))

    def _has_all_reports(self, writing: CheckpointWriting) -> bool:
        try:
            return super()._has_all_reports(writing)
        except (OSError, KeeperLost):
            return False

    def _read_report(self, path: Path) -> str | None:
        return self.keepers.read_report(path)

    def _delete_report(self, path: Path) -> None:
        self.keepers.delete_report(path)


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

    def open(self, engine: Engine, checkpoint: Path | None) -> Path | None:
        """Move checkpoints to the started cluster's nodes; return the new path of ``checkpoint``.

        Raises OSError, KeeperLost.
        """
        directory = self.memory.directory
        self._spread_what_is_there(engine)
        moved = checkpoint is not None and checkpoint.parent == directory
        return self.memory.path(find_step(checkpoint)) if checkpoint is not None and moved else checkpoint

    def forget_others(self, checkpoint: Path | None) -> None:
        """Delete the checkpoints in memory, unless the run goes on from one of them."""
        if checkpoint is None or checkpoint.parent != self.memory.directory:
            self.memory.clear()

    def begin(self, engine: Engine) -> None:
        """Write the first checkpoint. ValueError if processes of a trained model cannot use the same memory."""
        cluster = engine.cluster
        nodes = {slot.node for name in engine.learning for slot in cluster.placements.get(name, ())}
        if self.every and choose_cluster(engine.config) == "torchrun" and nodes.difference({cluster.driver_node}):
            raise ValueError(
                f"runtime.save_in_memory_every is {self.every}: with processes that torchrun starts there are no "
                "checkpoints in memory; set it to 0, and save_every to a few steps, or use `runtime.cluster: ray`"
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
        """Write a checkpoint of the last step, unless there is one; return its path. Raises OSError."""
        self.memory.finish()
        if engine.step not in self.memory.steps():
            self._begin(engine)
            self.memory.finish()
        self._spread(engine)
        return self.memory.path(engine.step)

    def restore(self, engine: Engine) -> bool:
        for checkpoints in (self.memory, self.disk):
            with suppress(Exception):  # the lost process may have been writing
                checkpoints.settle()
        try:
            self._spread_what_is_there(engine)
            newest = find_newest(self.memory, self.disk)
        except KeeperLost as problem:  # its node was lost meanwhile
            failure = WorkerFailure("checkpoint lost", str(problem), "")
            raise WorkerLost(Call(None, "restore"), [], failure) from problem
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
            self._begin(engine)
        engine.phase("hooks")

    def _spread(self, engine: Engine) -> None:
        """Keep checkpoints in the memory of the nodes that now train, if the cluster has several nodes."""
        keepers = engine.cluster.open_keepers(self.folder.path, engine.learning)
        if keepers is not None and self.memory.directory != keepers.folder:
            self.memory = NodeCheckpoints(keepers, self.memory)
            self.memory.on_complete = self._tidy

    def _spread_what_is_there(self, engine: Engine) -> None:
        if has_keepers(self.folder.path) or self.memory.steps():
            self._spread(engine)

    def _tidy(self, step: int) -> None:
        """Delete old checkpoints after one has become complete."""
        with self._sink.survive():
            self.memory.prune(None)

    def _begin(self, engine: Engine) -> None:
        self._spread(engine)
        self.memory.directory.mkdir(mode=0o700, exist_ok=True)
        if not (link := self.memory.directory / RUN).is_symlink():
            link.symlink_to(self.folder.path.absolute())
        self.memory.begin(engine.step, partial(write_engine_state, engine, exports=False))

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
