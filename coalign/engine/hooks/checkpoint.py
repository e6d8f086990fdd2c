"""Checkpoints: their content, when one is written, and how a run resumes from one.

``checkpoints/step_N/`` holds:

- ``state.json``: step, data position, state of the recipe and of the hooks (Provenance: settings, hashes of models);
- ``buffer.pt``: batches between environment and trainer;
- ``models/<name>/``: the state with which that backend continues bit for bit;
- ``hf/``: the trained model as a Hugging Face directory; ``hf_<name>/`` for every further model that is trained,
  ``hf_ema/`` for an average of the weights, ``adapter/`` for LoRA adapters;
- ``manifest.json``: size and SHA-256 of every other file. It is written last.

Training waits only until the state is copied to host memory (backends without `begin_saves`: until it is written).
checkpoint_folder.py completes the checkpoint meanwhile.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from coalign.cluster.future import WorkerLost
from coalign.config.schema import RunConfig
from coalign.data.batch import Batch
from coalign.engine.engine import Hook
from coalign.engine.hooks.checkpoint_folder import Checkpoints
from coalign.engine.hooks.evaluation import is_improvement
from coalign.types import ImageSpan, Stats, Total

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine
    from coalign.engine.hooks.checkpoint_remote import RemoteCheckpoints


log = logging.getLogger(__name__)
MODELS = "models"  # folder of a checkpoint that the trained models' processes write


class _ModelFiles:
    """The files that the workers of ``models`` write in the background: an UnfinishedFiles."""

    def __init__(self) -> None:
        self.models: list[DistModel[Any]] = []
        self.paths: list[Path] = []

    def finish(self) -> None:
        """Wait for all models, then raise the first error."""
        calls = [model.call("finish_saves", fatal=False) for model in self.models]
        problems = []
        for call in calls:
            try:
                call.result()
            except Exception as problem:
                problems.append(problem)
        if problems:
            raise problems[0]


def write_engine_state(
    engine: Engine, directory: Path, snapshot: dict[str, Any] | None = None, *, exports: bool = True
) -> _ModelFiles:
    """Write the files of a checkpoint, all but the manifest; return those that workers still write.

    ``snapshot`` is the newest step's (None: it is taken now). ``exports``: also write directories for other programs.
    """
    state = engine.snapshot() if snapshot is None else dict(snapshot)
    environment = engine.environment.fetch_state(state.pop("environment"))
    state |= {
        "algorithm": engine.config.algorithm,
        "loader": environment.pop("loader"),
        "rewards": engine.rewards.fetch_state(state["rewards"]) if engine.rewards else {},
        "hooks": {type(hook).__name__: hook.state_dict() for hook in engine.hooks},
    }
    (directory / "state.json").write_text(json.dumps(state, indent=1))
    torch.save(to_plain(environment), directory / "buffer.pt")
    files, saves = _ModelFiles(), []
    save_starts = [engine.running[name].call("begin_saves", fatal=False) for name in engine.learning]
    try:
        for i, (name, save_start) in enumerate(zip(engine.learning, save_starts, strict=True)):
            model, suffix = engine.running[name], "" if i == 0 else f"_{name}"
            paths = [directory / MODELS / name]
            saves.append(model.save(str(paths[0])))
            if exports:
                paths.append(directory / f"hf{suffix}")
                saves.append(model.save_hf(str(paths[-1])))
            if exports and model.config.ema:
                paths.append(directory / f"hf{suffix}_ema")
                saves.append(model.save_hf(str(paths[-1]), average=True))
            if exports and model.config.lora:
                paths.append(directory / f"adapter{suffix}")
                saves.append(model.save_adapter(str(paths[-1])))
            if save_start.result():
                files.models.append(model)
                files.paths += paths
        for save in saves:
            save.result()
    except Exception:
        with suppress(Exception):
            files.finish()  # nobody may write into a directory that is deleted
        raise
    return files


def read_checkpoint(directory: Path, config: RunConfig) -> dict[str, Any]:
    """Read a checkpoint's state.json. Raises ValueError for one of another recipe or other data."""
    state = json.loads((directory / "state.json").read_text())
    if state["algorithm"] != config.algorithm:
        raise ValueError(f"{directory} is of a `{state['algorithm']}` run; this one is `{config.algorithm}`")
    if (state["ptx"] is None) != (config.ptx is None):
        there, here = ("with", "without") if state["ptx"] else ("without", "with")
        raise ValueError(f"{directory} is of a run {there} `ptx`; this one is {here} it")
    return state


def restore_engine(engine: Engine, directory: Path) -> None:
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
    environment = _from_plain(load_plain(directory / "buffer.pt"))
    engine.environment.load_state_dict({"loader": state["loader"], **environment})
    if engine.ptx_loader:
        engine.ptx_loader.load_state_dict(state["ptx"])


def to_plain(value: Any) -> Any:
    """Replace the batches in a state by dictionaries of tensors and lists, which load without running any code."""
    if isinstance(value, Batch):
        return {"lengths": value.lengths, "token": dict(value.token), "sequence": dict(value.sequence)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return {key: to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def load_plain(path: str | Path) -> Any:
    """Load a file of what `to_plain` returns: tensors, plain values, and spans of images."""
    with torch.serialization.safe_globals([ImageSpan]):
        return torch.load(path, weights_only=True)


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"lengths", "token", "sequence"}:
        return Batch(**value)
    return {key: _from_plain(item) for key, item in value.items()}


class Save(Hook):
    """Begins a checkpoint every ``every`` steps and ``minutes``, at the end, and when the loop is asked to stop.

    It is written while training goes on. The next one, a rollback and the end of the run wait for it. An unhealthy step
    (coalign.engine.hooks.guards) is not saved unless the run ends there. A checkpoint that cannot be written, for
    whatever reason, does not end the run: a warning names the last good one. Only the first checkpoint (a run that
    cannot save should not continue) and the last one must succeed. Complete checkpoints are also copied to ``remote``;
    only the end of the run waits for the copies.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int,
        minutes: float = 0.0,
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        """``every``, ``minutes``: 0 switches saving by steps, by time off."""
        self.checkpoints = checkpoints
        self.every = every
        self.seconds = 60.0 * minutes
        self.saved_at = time.monotonic()  # start of the newest checkpoint
        self.metric = best
        self.mode: Literal["max", "min"] = mode
        self.best: tuple[float, int] | None = None  # value, step
        self._kept: int | None = None  # the best step that has a checkpoint
        self._step = 0  # step of the newest checkpoint
        self._first = 0  # step at which this process began
        self.remote = remote
        checkpoints.on_complete = self._tidy

    def begin(self, engine: Engine) -> None:
        self._first = engine.step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        last = engine.complete or engine.stop is not None
        if self.remote and (failures := self.remote.take_failures()):
            engine.progress.report_late({"checkpoint/remote_failed": Total(failures)})
        if engine.progress.healthy and self.metric in stats:
            value = stats[self.metric].value
            if is_improvement(value, self.best and self.best[0], self.mode):
                self.best = (value, engine.step)
        is_best = self.best is not None and self.best[1] == engine.step
        due = is_best or (self.every and engine.step % self.every == 0)
        overdue = self.seconds and time.monotonic() - self.saved_at >= self.seconds
        due = due or (overdue and engine.served == engine.step)  # between two syncs the generators have older weights
        if not (last or (due and engine.progress.healthy)):
            self._complete(engine, wait=False)
            return
        engine.phase("save")
        self._complete(engine, wait=True)
        self._step = engine.step
        try:
            self.checkpoints.begin(engine.step, lambda directory: write_engine_state(engine, directory))
        except WorkerLost:  # the engine restarts the process
            raise
        except Exception as problem:  # libraries that write tensors report a full disk by their own error types
            self._report(engine, problem, fatal=last)
        self.saved_at = time.monotonic()
        if last:
            self._complete(engine, wait=True, fatal=True)
        engine.phase("hooks")

    def save_now(self, engine: Engine) -> Path:
        """Write a checkpoint of the last step, unless there is one, and wait for it; return its path.

        Raises what writing raises.
        """
        self._complete(engine, wait=True)
        if engine.step not in self.checkpoints.steps():
            self._step = engine.step
            self.checkpoints.write(engine.step, partial(write_engine_state, engine))
            self.saved_at = time.monotonic()
        return self.checkpoints.path(engine.step)

    def end(self, engine: Engine) -> None:
        engine.phase("save")
        if engine.stop is not None and engine.progress.healthy and engine.step > self._first:
            self.save_now(engine)  # a signal may have come after `after_step`
        self._complete(engine, wait=True)
        self._finish_copies()
        engine.phase("hooks")

    def save_after_error(self, engine: Engine, error: Exception) -> None:
        """Write a checkpoint of the last step, if it has none; add a note to ``error`` that says where to continue.

        Samples of rollouts that have failed or not ended are not kept: the run generates them again.
        """
        engine.cluster.accept_calls()
        try:
            self.checkpoints.finish()
        except Exception as problem:
            error.add_note(f"step {self._step} could not be saved: {_first_line(problem)}")
        snapshot = engine.progress.consistent_state
        steps = self.checkpoints.steps()
        new = engine.step > self._first and engine.step not in steps
        if snapshot is not None and engine.progress.healthy and new:
            try:
                self.checkpoints.write(engine.step, partial(write_engine_state, engine, snapshot=snapshot))
                steps.append(engine.step)
            except Exception as problem:
                error.add_note(f"step {engine.step} could not be saved: {_first_line(problem)}")
        if steps:
            error.add_note(f"saved up to step {max(steps)}: the same command continues there")
        self._finish_copies()

    def _finish_copies(self) -> None:
        if self.remote:
            self.remote.finish()
            with suppress(OSError):
                self._prune()  # checkpoints that were held until they were copied

    def _complete(self, engine: Engine, *, wait: bool, fatal: bool = False) -> None:
        """Handle the end of a checkpoint that is being written; with ``wait``, wait for it."""
        try:
            self.checkpoints.finish() if wait else self.checkpoints.poll()
        except WorkerLost:  # the engine starts it again
            raise
        except Exception as problem:
            self._report(engine, problem, fatal=fatal)

    def _report(self, engine: Engine, problem: Exception, *, fatal: bool) -> None:
        """Log that the newest checkpoint could not be written; raise ``problem`` if it is ``fatal``, or the first."""
        good = self.checkpoints.steps()
        free = f"{shutil.disk_usage(self.checkpoints.directory).free / 2**20:.1f} MiB are free on that disk"
        if fatal or not good:
            problem.add_note(f"the checkpoint of step {self._step} could not be written; {free}")
            raise problem
        log.warning(
            "the checkpoint of step %d could not be written (%s; %s); training continues, the last good one is step %d",
            self._step,
            _first_line(problem),
            free,
            good[-1],
        )
        engine.progress.report_late({"checkpoint/failed": Total(1.0)})

    def _tidy(self, step: int) -> None:
        """Point `model` to the best or newest checkpoint, and delete old ones."""
        if self.best is not None and self.best[1] in self.checkpoints.steps():
            self._kept = self.best[1]  # until then the previous best one stays
        if self.remote:  # if the run folder was lost, the best checkpoint may exist there only
            self.remote.begin(step, self.best[1] if self._kept is None and self.best else self._kept)
        try:
            self.checkpoints.link_model(step if self._kept is None else self._kept)
            self._prune()
        except OSError as problem:
            log.warning("the checkpoint of step %d is complete, but: %s", step, problem)

    def _prune(self) -> None:
        self.checkpoints.prune(self._kept, self.remote.list_held() if self.remote else ())

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = tuple(state["best"]) if state["best"] else None


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]
