"""How a run begins again: which checkpoint it goes on from, what it loads, and what becomes of later checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.checkpoint.folder import CheckpointFolder, MemoryFolder
from coalign.checkpoint.manifest import CorruptCheckpoint, RemoteError, find_step, verify_checkpoint
from coalign.config.errors import ConfigError, ConfigProblem, located_at
from coalign.config.schema import RunConfig
from coalign.config.schema.runtime import RuntimeConfig
from coalign.data.batch import load_batches

if TYPE_CHECKING:
    from coalign.checkpoint.remote import RemoteCheckpoints
    from coalign.engine.engine import Engine
    from coalign.engine.hooks.run_folder import RunFolder

log = logging.getLogger(__name__)
MODELS = "models"  # folder of a checkpoint that the trained models' processes write


@dataclass(frozen=True)
class RunStores:
    """Where a run keeps its checkpoints."""

    disk: CheckpointFolder
    memory: MemoryFolder
    remote: RemoteCheckpoints | None = None

    @classmethod
    def open(cls, folder: RunFolder, runtime: RuntimeConfig) -> RunStores:
        """Raises PermissionError if the folder in memory is another user's."""
        disk = CheckpointFolder(folder.checkpoints, runtime.keep)
        remote = None
        if runtime.save_copies_to:
            from coalign.checkpoint.remote import RemoteCheckpoints  # and fsspec

            remote = RemoteCheckpoints(runtime.save_copies_to, disk)
        return cls(disk, MemoryFolder(folder.path), remote)

    def find(self, resume: str) -> Path | None:
        """Return the checkpoint that `runtime.resume` names, None for a run that begins anew.

        Raises what `find_newest` raises.
        """
        if resume == "never":
            return None
        if resume == "auto":
            return find_newest([self.disk, self.memory, *([self.remote] if self.remote else [])])
        if "://" in resume:
            from coalign.checkpoint.remote import RemoteCheckpoints

            parent, _, name = resume.rstrip("/").rpartition("/")
            return RemoteCheckpoints(parent, self.disk).fetch(find_step(Path(name)))
        verify_checkpoint(Path(resume))
        return Path(resume)

    def abandon(self) -> None:
        """Cancel the checkpoints that are being written."""
        self.disk.abandon()
        self.memory.abandon()


def find_newest(stores: Sequence[CheckpointFolder | RemoteCheckpoints]) -> Path | None:
    """Return the newest checkpoint that passes verification; of two at one step, that of the first store.

    Those that fail are logged. None without any. CorruptCheckpoint if there are some and all fail; RemoteError if a
    store cannot be read and the others have none.
    """
    candidates: list[tuple[int, CheckpointFolder | RemoteCheckpoints]] = []
    corrupt: list[tuple[str, str]] = []  # location, problem
    unreadable: dict[str, RemoteError] = {}  # by location
    for store in stores:
        try:
            candidates += [(step, store) for step in store.list_candidates()]
        except RemoteError as error:
            unreadable[store.location] = error
    for step, store in sorted(candidates, key=lambda candidate: candidate[0], reverse=True):
        if store.location in unreadable:  # an older copy would hide that there are newer ones
            continue
        try:
            newest = store.fetch(step)
        except CorruptCheckpoint as problem:
            log.warning("%s; trying the one before", problem)
            corrupt.append((store.location, str(problem)))
        except RemoteError as error:
            unreadable[store.location] = error
        else:
            for error in unreadable.values():
                log.warning("%s; continuing from %s", error, newest)
            return newest
    where = " or ".join(dict.fromkeys(location for location, _ in corrupt))
    problems = f"no checkpoint in {where} is intact ({'; '.join(problem for _, problem in corrupt)})"
    for error in unreadable.values():
        raise RemoteError(
            f"{problems if corrupt else f'{stores[0].location} has no checkpoint'}, and {error}. Once they can be "
            "read, the same command continues; `runtime.resume=never` begins anew"
        ) from error
    if corrupt:
        raise CorruptCheckpoint(
            f"{problems}. Restore one, or start anew with `runtime.resume=never`, which moves them and the metrics "
            "aside"
        )
    return None


def find_distant_model(engine: Engine) -> str | None:
    """Return the name of a trained model that has processes on another node than the driver, if one has.

    They cannot read the checkpoints in the driver's memory.
    """
    cluster = engine.cluster
    for name in engine.learning:
        if any(placement.node != cluster.driver_node for placement in cluster.placements.get(name, ())):
            return name
    return None


def resume(engine: Engine, stores: RunStores, checkpoint: Path | None, folder: RunFolder) -> None:
    """Let a run go on from ``checkpoint`` or, without one, begin; what comes after that step is moved aside.

    Of a checkpoint in memory that some rank cannot read, the newest on the disk takes the place.
    """
    if checkpoint is not None and checkpoint.parent == stores.memory.directory and find_distant_model(engine):
        checkpoint = find_newest([stores.disk])
    if checkpoint is None:
        folder.move_records_aside()  # an earlier run's
    else:
        _restore_engine(engine, checkpoint)
        stores.disk.move_later_aside(engine.step)
        log.info("continuing from %s", checkpoint)
    if checkpoint is None or checkpoint.parent != stores.memory.directory:
        stores.memory.clear()
    if stores.remote:
        stores.remote.begin_run(-1 if checkpoint is None else engine.step)


def read_checkpoint(directory: Path, config: RunConfig) -> dict[str, Any]:
    """Read a checkpoint's state.json. Raises ValueError for one of another recipe or other data."""
    state = json.loads((directory / "state.json").read_text())
    if state["algorithm"] != config.algorithm:
        raise ValueError(f"{directory} is of a `{state['algorithm']}` run; this one is `{config.algorithm}`")
    if (state["ptx"] is None) != (config.ptx is None):
        there, here = ("with", "without") if state["ptx"] else ("without", "with")
        raise ValueError(f"{directory} is of a run {there} `ptx`; this one is {here} it")
    return state


def _restore_engine(engine: Engine, directory: Path) -> None:
    """Resume from a checkpoint, hooks included. Raises ValueError for one of another recipe or other data."""
    state = read_checkpoint(directory, engine.config)
    for hook in engine.hooks:
        if saved := state["hooks"].get(type(hook).__name__):
            hook.load_state_dict(saved)
    _load_training_state(engine, directory, state)
    _load_data_state(engine, directory, state)


def rewind_engine(engine: Engine, directory: Path, *, repeat: bool) -> None:
    """Return to the weights and the step of a checkpoint of this run, and tell the hooks (``after_rewind``).

    ``repeat``: also to its samples and its position in the data. Otherwise the run continues with data not drawn yet,
    and all samples since the checkpoint are discarded, also those being generated.
    """
    state = json.loads((directory / "state.json").read_text())
    _load_training_state(engine, directory, state)
    if repeat:
        _load_data_state(engine, directory, state)
    else:
        engine.environment.restart(engine.step)
    engine.training.sync(engine.step)
    for hook in engine.hooks:
        hook.after_rewind(state["hooks"].get(type(hook).__name__, {}), repeat=repeat)


def _load_training_state(engine: Engine, directory: Path, state: dict[str, Any]) -> None:
    """Load the trained models, the state of rewards and recipe, and the step."""
    loads = [engine.running[name].load(str(directory / MODELS / name)) for name in engine.learning]
    for load in loads:
        load.result()
    engine.progress.return_to(state["step"], state["tokens"])
    if engine.rewards:
        engine.rewards.load_state_dict(state["rewards"])
    engine.load_state_dict(state["recipe"])


def _load_data_state(engine: Engine, directory: Path, state: dict[str, Any]) -> None:
    """Load the samples between environment and trainer, and the position in the data."""
    engine.environment.load_state_dict({"loader": state["loader"], **load_batches(directory / "buffer.pt")})
    if engine.ptx_loader:
        engine.ptx_loader.load_state_dict(state["ptx"])


def check_copies(config: RunConfig) -> None:
    """Refuse a URL that nothing can be copied to. ImportError if its package is missing."""
    if url := config.runtime.save_copies_to:
        from coalign.checkpoint.remote import check_url  # and fsspec

        with located_at("runtime", "save_copies_to"):
            check_url(url, config.output)


def check_resume(config: RunConfig) -> None:
    """Refuse to resume from a directory that is not there, or from a URL that is no checkpoint's."""
    resume = config.runtime.resume
    if "://" in resume:
        from coalign.checkpoint.remote import check_url

        with located_at("runtime", "resume"):
            check_url(resume, config.output)
            if find_step(Path(resume)) < 0:
                raise ValueError("expected the URL of a checkpoint, such as s3://bucket/run/step_100")
    elif resume not in ("auto", "never") and not Path(resume).is_dir():
        message = (
            f"is '{resume}', and there is no such directory; expected auto | never | a checkpoint, "
            "such as RUN/checkpoints/step_100 or s3://bucket/run/step_100"
        )
        raise ConfigError([ConfigProblem(("runtime", "resume"), message)])
