"""Checkpoints: what they hold, when one is written, and how a run resumes from one.

``checkpoints/step_N/`` holds:

- ``state.json``: step, data position, state of the recipe and of the hooks (Provenance: settings, hashes of models);
- ``buffer.pt``: batches between environment and trainer;
- ``models/<name>/``: what that backend needs to continue bit for bit;
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
MODELS = "models"  # in a checkpoint: what the trained models' processes write


class ModelFiles:
    """What the workers of ``models`` write in the background: an UnfinishedFiles."""

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
) -> ModelFiles:
    """Write the files of a checkpoint, all but the manifest; return those that workers still write.

    ``snapshot`` (None: one of now) is of the newest step. ``exports``: directories for other programs, too.
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
    files, saves = ModelFiles(), []
    begun = [engine.running[name].call("begin_saves", fatal=False) for name in engine.learning]
    try:
        for i, (name, begin) in enumerate(zip(engine.learning, begun, strict=True)):
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
            if begin.result():
                files.models.append(model)
                files.paths += paths
        for save in saves:
            save.result()
    except Exception:
        with suppress(Exception):
            files.finish()  # no one may write into a directory that is deleted
        raise
    return files


def read_state(directory: Path, config: RunConfig) -> dict[str, Any]:
    """Read what a checkpoint knows beside weights. Raises ValueError for one of another recipe or other data."""
    state = json.loads((directory / "state.json").read_text())
    if state["algorithm"] != config.algorithm:
        raise ValueError(f"{directory} is of a `{state['algorithm']}` run; this one is `{config.algorithm}`")
    if (state["ptx"] is None) != (config.ptx is None):
        there, here = ("with", "without") if state["ptx"] else ("without", "with")
        raise ValueError(f"{directory} is of a run {there} `ptx`; this one is {here} it")
    return state


def restore_engine(engine: Engine, directory: Path) -> None:
    """Resume from a checkpoint, hooks included. Raises ValueError for one of another recipe or other data."""
    state = read_state(directory, engine.config)
    for hook in engine.hooks:
        if saved := state["hooks"].get(type(hook).__name__):
            hook.load_state_dict(saved)
    _load_training_state(engine, directory, state)
    _load_data_state(engine, directory, state)


def rewind_engine(engine: Engine, directory: Path, *, repeat: bool) -> None:
    """Return to the weights and the step of a checkpoint of this run.

    ``repeat``: with its samples and its position in the data. Otherwise continue with data not drawn yet; samples made
    since then are discarded, also those being generated. Hooks learn of it by ``after_rewind``.
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
    engine.step, engine.tokens = state["step"], state["tokens"]
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
    cannot save should not continue) and the last one must succeed. Each one that is complete is also copied to
    ``remote``; only the end of the run waits for that.
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
        """``every``, ``minutes``: 0 for none by steps, by time."""
        self.checkpoints = checkpoints
        self.every = every
        self.seconds = 60.0 * minutes
        self.begun = time.monotonic()  # when the newest checkpoint was
        self.metric = best
        self.mode: Literal["max", "min"] = mode
        self.best: tuple[float, int] | None = None  # value, step
        self._kept: int | None = None  # the best step that has a checkpoint
        self._step = 0  # of the newest checkpoint begun
        self._first = 0  # where this process began
        self.remote = remote
        checkpoints.on_complete = self._tidy

    def begin(self, engine: Engine) -> None:
        self._first = engine.step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        last = engine.complete or engine.stop is not None
        if self.remote and (failures := self.remote.take_failures()):
            engine.late = engine.late | {"checkpoint/remote_failed": Total(failures)}
        if engine.healthy and self.metric in stats:
            value = stats[self.metric].value
            if is_improvement(value, self.best and self.best[0], self.mode):
                self.best = (value, engine.step)
        is_best = self.best is not None and self.best[1] == engine.step
        due = is_best or (self.every and engine.step % self.every == 0)
        late = self.seconds and time.monotonic() - self.begun >= self.seconds
        due = due or (late and engine.served == engine.step)  # between two syncs the engines have older weights
        if not (last or (due and engine.healthy)):
            self._complete(engine, wait=False)
            return
        engine.phase("save")
        self._complete(engine, wait=True)
        self._step = engine.step
        try:
            self.checkpoints.begin(engine.step, lambda directory: write_engine_state(engine, directory))
        except WorkerLost:  # the engine starts it again
            raise
        except Exception as problem:  # writers of tensors report a full disk by errors of their own
            self._report(engine, problem, fatal=last)
        self.begun = time.monotonic()
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
            self.begun = time.monotonic()
        return self.checkpoints.path(engine.step)

    def end(self, engine: Engine) -> None:
        engine.phase("save")
        if engine.stop is not None and engine.healthy and engine.step > self._first:
            self.save_now(engine)  # a signal may come when this step has had its turn
        self._complete(engine, wait=True)
        self._finish_copies()
        engine.phase("hooks")

    def save_after_error(self, engine: Engine, error: Exception) -> None:
        """Write a checkpoint of the last step if the error came after it; say in ``error`` where the run continues.

        Samples of rollouts that have failed or not ended are not kept: the run generates them again.
        """
        engine.cluster.accept_calls()
        try:
            self.checkpoints.finish()
        except Exception as problem:
            error.add_note(f"step {self._step} could not be saved: {_first_line(problem)}")
        snapshot = engine.whole
        steps = self.checkpoints.steps()
        new = engine.step > self._first and engine.step not in steps
        if snapshot is not None and engine.healthy and new:
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
                self._prune()  # what the copies have held

    def _complete(self, engine: Engine, *, wait: bool, fatal: bool = False) -> None:
        """Take note of a checkpoint that has become complete or has failed; with ``wait``, once it has."""
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
        engine.late = engine.late | {"checkpoint/failed": Total(1.0)}

    def _tidy(self, step: int) -> None:
        """Point `model` to the best or newest checkpoint, and delete old ones."""
        if self.best is not None and self.best[1] in self.checkpoints.steps():
            self._kept = self.best[1]  # until then the best one before it stays
        if self.remote:  # of a run that lost its folder the best one may be there only
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
