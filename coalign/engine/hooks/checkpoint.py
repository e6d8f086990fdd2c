"""Checkpoints: what they hold, when one is written, and how a run resumes from one.

``checkpoints/step_N/`` holds:

- ``state.json``: step, data position, state of the recipe and of the hooks (Provenance: settings, hashes of models);
- ``buffer.pt``: batches between environment and trainer;
- ``models/<name>/``: what that backend needs to continue bit for bit;
- ``hf/``: the trained model as a Hugging Face directory; ``hf_<name>/`` for every further model that is trained,
  ``hf_ema/`` for an average of the weights, ``adapter/`` for LoRA adapters;
- ``manifest.json``: size and SHA-256 of every other file. It is written last.

A checkpoint is written beside its place, hashed, flushed and then renamed: it is complete or it does not exist.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from coalign.config.schema import RunConfig
from coalign.data.batch import Batch
from coalign.engine.engine import Hook
from coalign.engine.environment import drop_failed_rounds
from coalign.engine.hooks.evaluation import is_improvement
from coalign.files import describe_problem, flush_path, hash_file, move_aside, read_json_object, write_atomically
from coalign.types import Stats, Total

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine


log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class CorruptCheckpoint(OSError):
    """A checkpoint whose files do not match its manifest."""


class Checkpoints:
    """The checkpoints of one run folder: the newest ``keep``, and the best by a metric if one is watched."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending. Their files are not verified."""
        return [step for step in self._list_directories() if (self.path(step) / MANIFEST).exists()]

    def _list_directories(self) -> list[int]:
        names = [path.name.removeprefix("step_") for path in self.directory.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def write(self, step: int, write_files: Callable[[Path], None]) -> Path:
        """Write the checkpoint of ``step``, whose files ``write_files(directory)`` writes; return its path.

        Raises what writing raises (a full disk is an OSError, here or in a worker). Nothing is left behind then, and
        earlier checkpoints stay as they are.
        """
        final = self.path(step)
        with write_atomically(final) as aside:
            aside.mkdir(parents=True)
            write_files(aside)
            files = {
                str(file.relative_to(aside)): {"size": file.stat().st_size, "sha256": hash_file(file)}
                for file in sorted(aside.rglob("*"))
                if file.is_file()
            }
            (aside / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
            for path in (*aside.rglob("*"), aside):
                flush_path(path)
            # An interrupted `prune` may have left a directory there, or this run before a rollback.
            shutil.rmtree(final, ignore_errors=True)
        flush_path(self.directory)
        return final

    def link_model(self, step: int) -> None:
        """Make `model`, beside the checkpoint folder, a link to the Hugging Face directory of ``step``."""
        link = self.directory.parent / "model"
        with write_atomically(link) as aside:
            aside.symlink_to(os.path.relpath(self.path(step) / "hf", link.parent))

    def prune(self, best: int | None) -> None:
        """Delete all checkpoints but the newest ``keep`` and the ``best`` step."""
        for step in self.steps()[: -self.keep]:
            if step != best:
                # The manifest goes first: a half-deleted directory must not look like a checkpoint.
                (self.path(step) / MANIFEST).unlink()
                shutil.rmtree(self.path(step))

    def find_newest(self) -> Path | None:
        """Return the newest checkpoint that passes verification, None without any. Those that fail are logged.

        CorruptCheckpoint if there are some and all fail.
        """
        problems = []
        for step in reversed(self._list_directories()):
            try:
                verify_checkpoint(self.path(step))
            except CorruptCheckpoint as problem:
                log.warning("%s; trying the one before", problem)
                problems.append(str(problem))
            else:
                return self.path(step)
        if problems:
            raise CorruptCheckpoint(
                f"no checkpoint in {self.directory} is intact ({'; '.join(problems)}). Restore one, or start anew with "
                "`runtime.resume=never`, which moves them and the metrics aside"
            )
        return None

    def move_later_aside(self, step: int) -> None:
        """Rename the checkpoints after ``step``: the run goes on from there, and will not continue from these."""
        for later in self._list_directories():
            if later > step:
                path = self.path(later)
                log.warning("%s comes after step %d; it is now %s", path, step, move_aside(path))


def verify_checkpoint(path: Path) -> None:
    """Check every file against the manifest. Raises CorruptCheckpoint naming the first file that differs."""
    try:
        files: dict[str, Any] = read_json_object(path / MANIFEST)["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CorruptCheckpoint(f"{path} has no readable {MANIFEST} ({describe_problem(problem)})") from problem
    for name, (length, digest) in expected.items():
        if not os.path.isfile(path / name):
            raise CorruptCheckpoint(f"{path}: {name} is missing")
        if (size := (path / name).stat().st_size) != length:
            raise CorruptCheckpoint(f"{path}: {name} has {size} bytes, {length!r:.30} were written")
        if hash_file(path / name) != digest:
            raise CorruptCheckpoint(f"{path}: the contents of {name} have changed since they were written")


def write_engine_state(engine: Engine, directory: Path, snapshot: dict[str, Any] | None = None) -> None:
    """Write the files of a checkpoint, all but the manifest. ``snapshot`` (None: one of now) is of the newest step."""
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
    saves = []
    for i, name in enumerate(engine.learning):
        model, suffix = engine.running[name], "" if i == 0 else f"_{name}"
        saves.append(model.save(str(directory / "models" / name)))
        saves.append(model.save_hf(str(directory / f"hf{suffix}")))
        if model.config.ema:
            saves.append(model.save_hf(str(directory / f"hf{suffix}_ema"), average=True))
        if model.config.lora:
            saves.append(model.save_adapter(str(directory / f"adapter{suffix}")))
    for save in saves:
        save.result()


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
    environment = _from_plain(torch.load(directory / "buffer.pt", weights_only=True))
    engine.environment.load_state_dict({"loader": state["loader"], **environment}, engine.step)
    if engine.ptx_loader:
        engine.ptx_loader.load_state_dict(state["ptx"])


def rewind_engine(engine: Engine, directory: Path) -> None:
    """Return to the weights and the step of a checkpoint of this run, and continue with data not drawn yet.

    Samples made since then are discarded, also those being generated. Hooks keep their state.
    """
    _load_training_state(engine, directory, json.loads((directory / "state.json").read_text()))
    engine.environment.restart(engine.step)
    engine.training.sync(engine.step)


def _load_training_state(engine: Engine, directory: Path, state: dict[str, Any]) -> None:
    """Load the trained models, the state of rewards and recipe, and the step."""
    loads = [engine.running[name].load(str(directory / "models" / name)) for name in engine.learning]
    for load in loads:
        load.result()
    engine.step, engine.tokens = state["step"], state["tokens"]
    if engine.rewards:
        engine.rewards.load_state_dict(state["rewards"])
    engine.load_state_dict(state["recipe"])


def to_plain(value: Any) -> Any:
    """Replace the batches in a state by dictionaries of tensors and lists, which load without running any code."""
    if isinstance(value, Batch):
        return {"lengths": value.lengths, "token": dict(value.token), "sequence": dict(value.sequence)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return {key: to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"lengths", "token", "sequence"}:
        return Batch(**value)
    return {key: _from_plain(item) for key, item in value.items()}


class Save(Hook):
    """Writes a checkpoint every ``every`` steps and ``minutes``, at the end, and when the loop is asked to stop.

    An unhealthy step (coalign.engine.hooks.guards) is not saved unless the run ends there. A checkpoint that cannot be
    written, for whatever reason, does not end the run: a warning names the last good one. Only the first checkpoint (a
    run that cannot save should not continue) and the last one must succeed.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int,
        minutes: float = 0.0,
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        """``every``, ``minutes``: 0 for none by steps, by time."""
        self.checkpoints = checkpoints
        self.every = every
        self.seconds = 60.0 * minutes
        self.written = time.monotonic()  # when the newest checkpoint was
        self.metric = best
        self.mode: Literal["max", "min"] = mode
        self.best: tuple[float, int] | None = None  # value, step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        last = engine.complete or engine.stop is not None
        if engine.healthy and self.metric in stats:
            value = stats[self.metric].value
            if is_improvement(value, self.best and self.best[0], self.mode):
                self.best = (value, engine.step)
        is_best = self.best is not None and self.best[1] == engine.step
        due = is_best or (self.every and engine.step % self.every == 0)
        late = self.seconds and time.monotonic() - self.written >= self.seconds
        due = due or (late and engine.served == engine.step)  # between two syncs the engines have older weights
        if not (last or (due and engine.healthy)):
            return
        engine.phase("save")
        try:
            self.checkpoints.write(engine.step, lambda directory: write_engine_state(engine, directory))
        except Exception as problem:  # writers of tensors report a full disk by errors of their own
            good = self.checkpoints.steps()
            free = f"{shutil.disk_usage(self.checkpoints.directory).free / 2**20:.1f} MiB are free on that disk"
            if last or not good:
                problem.add_note(f"the checkpoint of step {engine.step} could not be written; {free}")
                raise
            log.warning(
                "the checkpoint of step %d could not be written (%s; %s); training continues, "
                "the last good one is step %d",
                engine.step,
                str(problem).partition("\n")[0],
                free,
                good[-1],
            )
            engine.late = {"checkpoint/failed": Total(1.0)}
        else:
            self._finish(engine.step)
        self.written = time.monotonic()

    def save_after_error(self, engine: Engine, error: Exception) -> None:
        """Write a checkpoint of the last step if the error came after it; say in ``error`` where the run continues.

        Samples of roll-outs that have failed or not ended are not kept: their prompts are drawn again.
        """
        snapshot = engine.whole
        steps = self.checkpoints.steps()
        if snapshot is not None and engine.healthy and engine.step not in steps:
            engine.cluster.accept_calls()
            if dropped := drop_failed_rounds(snapshot["environment"]):
                log.warning("%d roll-outs have not ended; their prompts will be drawn again", dropped)
            try:
                self.checkpoints.write(engine.step, partial(write_engine_state, engine, snapshot=snapshot))
                steps.append(engine.step)
                self._finish(engine.step)
            except Exception as problem:
                reason, _, _ = str(problem).partition("\n")
                error.add_note(f"step {engine.step} could not be saved: {reason}")
        if steps:
            error.add_note(f"saved up to step {max(steps)}: the same command continues there")

    def _finish(self, step: int) -> None:
        """Point `model` to the best or newest checkpoint, and delete old ones."""
        best = self.best[1] if self.best else None
        try:
            self.checkpoints.link_model(step if best is None else best)
            self.checkpoints.prune(best)
        except OSError as problem:
            log.warning("the checkpoint of step %d is complete, but: %s", step, problem)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = tuple(state["best"]) if state["best"] else None
