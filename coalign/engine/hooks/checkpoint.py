"""Checkpoints that are whole or not there: written aside, hashed, flushed, renamed.

``checkpoints/step_N/`` holds ``state.json`` (step, cursor, recipe state, metrics), ``buffer.pt`` (batches between
environment and trainer), ``models/<name>/`` (what that backend needs to go on bit for bit), ``hf/`` (the trained model
as a Hugging Face directory) and, last of all, ``manifest.json`` with the size and SHA-256 of every other file.

What a checkpoint of an engine holds, when one is taken, and how a run goes on from one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from coalign.data.batch import Batch
from coalign.engine.engine import Hook
from coalign.types import Stats, Total

if TYPE_CHECKING:
    from coalign.engine.engine import Engine


log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class CorruptCheckpoint(RuntimeError):
    """A checkpoint that is not what its manifest says."""


class Checkpoints:
    """The checkpoints of one run folder: ``keep`` newest ones, and the best by a metric if one is watched."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending (finished is not verified)."""
        found = [p.name.removeprefix("step_") for p in self.directory.glob("step_*") if (p / MANIFEST).exists()]
        return sorted(int(name) for name in found if name.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Make the checkpoint of ``step``: ``fill(directory)`` writes its files.

        Raises what writing raises (a full disk is an OSError, here or in a worker) and then leaves nothing behind; the
        checkpoints before it stay as they are.
        """
        final, aside = self.path(step), self.directory / f".writing-step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            fill(aside)
            _seal(aside)
            # What an interrupted `prune` left, or this run's own before a rollback.
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _flush(self.directory)
        return final

    def point(self, step: int) -> None:
        """Let `model`, beside the folder of checkpoints, be the Hugging Face directory of this step's."""
        link = self.directory.parent / "model"
        aside = link.with_name(".model.writing")
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(self.path(step) / "hf", link.parent))
        os.replace(aside, link)

    def prune(self, best: int | None) -> None:
        """Delete all but the newest ``keep`` and the ``best`` step."""
        for step in self.steps()[: -self.keep]:
            if step != best:
                # The manifest goes first: a half-deleted directory must not look like a checkpoint.
                (self.path(step) / MANIFEST).unlink()
                shutil.rmtree(self.path(step))

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; those that do not are reported and passed over."""
        for step in reversed(self.steps()):
            try:
                verify(self.path(step))
            except CorruptCheckpoint as problem:
                log.warning("%s; trying the one before", problem)
            else:
                return self.path(step)
        return None


def verify(path: Path) -> None:
    """Check every file against the manifest. Raises CorruptCheckpoint naming the first file that differs."""
    try:
        files: dict[str, Any] = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as problem:
        raise CorruptCheckpoint(f"{path} has no readable {MANIFEST} ({problem})") from problem
    for name, expected in files.items():
        file = path / name
        if not file.exists():
            raise CorruptCheckpoint(f"{path}: {name} is missing")
        if (size := file.stat().st_size) != expected["size"]:
            raise CorruptCheckpoint(f"{path}: {name} has {size} bytes, {expected['size']} were written")
        if _digest(file) != expected["sha256"]:
            raise CorruptCheckpoint(f"{path}: the contents of {name} have changed since they were written")


def _seal(path: Path) -> None:
    """Flush all files of a directory to disk and write the manifest over them."""
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        files[str(file.relative_to(path))] = {"size": file.stat().st_size, "sha256": _digest(file)}
        _flush(file)
    with open(path / MANIFEST, "w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _digest(file: Path) -> str:
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fill(engine: Engine, directory: Path) -> None:
    """Write everything that ``restore`` reads, and for others `hf/` of the main model, `hf_<name>/` of any that learns
    besides, `hf_ema/` where it keeps an average of its weights, `adapter/` where it has adapters.
    """
    environment = engine.environment.state_dict()
    state = {
        "step": engine.step,
        "tokens": engine.tokens,
        "algorithm": engine.config.algorithm,
        "loader": environment.pop("loader"),
        "ptx": engine.ptx_loader.state_dict() if engine.ptx_loader else None,
        "rewards": engine.rewards.state_dict() if engine.rewards else {},
        "recipe": engine.state_dict(),
        "hooks": {type(hook).__name__: hook.state_dict() for hook in engine.hooks},
    }
    (directory / "state.json").write_text(json.dumps(state, indent=1))
    torch.save(_plain(environment), directory / "buffer.pt")
    saves = []
    for i, name in enumerate(engine.learning):
        model, own = engine.running[name], "" if i == 0 else f"_{name}"
        saves.append(model.save(str(directory / "models" / name)))
        saves.append(model.save_hf(str(directory / f"hf{own}")))
        if model.config.ema:
            saves.append(model.save_hf(str(directory / f"hf{own}_ema"), average=True))
        if model.config.lora:
            saves.append(model.save_adapter(str(directory / f"adapter{own}")))
    for save in saves:
        save.result()


def restore(engine: Engine, directory: Path) -> None:
    """Continue from a checkpoint, hooks included. ValueError if it is of another recipe or of other data."""
    state = _read(directory)
    if state["algorithm"] != engine.config.algorithm:
        raise ValueError(f"{directory} is of a `{state['algorithm']}` run; this one is `{engine.config.algorithm}`")
    if (state["ptx"] is None) != (engine.ptx_loader is None):
        there, here = ("with", "without") if state["ptx"] else ("without", "with")
        raise ValueError(f"{directory} is of a run {there} `ptx`; this one is {here} it")
    _learn_again(engine, directory, state)
    environment = _batches(torch.load(directory / "buffer.pt", weights_only=True))
    engine.environment.load_state_dict({"loader": state["loader"], **environment}, engine.step)
    if engine.ptx_loader:
        engine.ptx_loader.load_state_dict(state["ptx"])
    for hook in engine.hooks:
        if saved := state["hooks"].get(type(hook).__name__):
            hook.load_state_dict(saved)


def rewind(engine: Engine, directory: Path) -> None:
    """Take back all that was learned since a checkpoint of this run, and go on from its step with data not drawn yet.
    Samples made since are forgotten, also those under way; hooks keep what they know."""
    _learn_again(engine, directory, _read(directory))
    engine.environment.restart(engine.step)
    engine.trainers.sync(engine.step)


def _read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "state.json").read_text())


def _learn_again(engine: Engine, directory: Path, state: dict[str, Any]) -> None:
    """The models that learn, the recipe, and how far they had come."""
    loads = [engine.running[name].load(str(directory / "models" / name)) for name in engine.learning]
    for load in loads:
        load.result()
    engine.step, engine.tokens = state["step"], state["tokens"]
    if engine.rewards:
        engine.rewards.load_state_dict(state["rewards"])
    engine.load_state_dict(state["recipe"])


def _plain(value: Any) -> Any:
    """A state with its batches as dictionaries of tensors and lists, which load without running any code."""
    if isinstance(value, Batch):
        return {"lengths": value.lengths, "token": dict(value.token), "sequence": dict(value.sequence)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _batches(value: Any) -> Any:
    """What ``_plain`` was given."""
    if isinstance(value, list):
        return [_batches(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"lengths", "token", "sequence"}:
        return Batch(**value)
    return {key: _batches(item) for key, item in value.items()}


class Save(Hook):
    """Takes a checkpoint every ``every`` steps, at the end, and when the loop is asked to stop.

    None of an unhealthy step (coalign.engine.hooks.guards), unless the run ends there.

    A checkpoint that cannot be written does not end the run: it goes on with the last good one and says so. Whatever
    the reason: writers of tensors report a full disk by errors of their own. Only the first checkpoint (a run that
    cannot save should not go on) and the last one must succeed.
    """

    def __init__(
        self, checkpoints: Checkpoints, every: int, best: str | None = None, mode: Literal["max", "min"] = "max"
    ) -> None:
        self.checkpoints = checkpoints
        self.every = every
        self.metric, self.mode = best, mode
        self.best: tuple[float, int] | None = None  # value, step

    def after_step(self, engine: Engine, stats: Stats, batch: Any) -> None:
        last = engine.complete or engine.stop is not None
        if engine.healthy and self.metric in stats and self._is_best(stats[self.metric].value):
            self.best = (stats[self.metric].value, engine.step)
        best_now = self.best is not None and self.best[1] == engine.step
        due = best_now or (self.every and engine.step % self.every == 0)
        if not (last or (due and engine.healthy)):
            return
        engine.phase("save")
        try:
            self.checkpoints.write(engine.step, lambda directory: fill(engine, directory))
        except Exception as problem:
            good = self.checkpoints.steps()
            free = f"{shutil.disk_usage(self.checkpoints.directory).free / 2**20:.1f} MiB are free on that disk"
            if last or not good:
                problem.add_note(f"the checkpoint of step {engine.step} could not be written; {free}")
                raise
            log.warning(
                "the checkpoint of step %d could not be written (%s; %s); training goes on, "
                "the last good one is step %d",
                engine.step,
                str(problem).partition("\n")[0],
                free,
                good[-1],
            )
            engine.late = {"checkpoint/failed": Total(1.0)}
        else:
            best = self.best[1] if self.best else None
            self.checkpoints.point(engine.step if best is None else best)
            self.checkpoints.prune(best)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = tuple(state["best"]) if state["best"] else None

    def _is_best(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return value > self.best[0] if self.mode == "max" else value < self.best[0]
