"""What a checkpoint of an engine holds, when one is taken, and how a run goes on from one."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from coalign.data.batch import Batch
from coalign.runtime.checkpoint import Checkpoints
from coalign.runtime.hook import Hook
from coalign.types import Stats, Total

if TYPE_CHECKING:
    from coalign.runtime.engine import Engine

log = logging.getLogger(__name__)


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
        model, own = engine.models_running[name], "" if i == 0 else f"_{name}"
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
    loads = [engine.models_running[name].load(str(directory / "models" / name)) for name in engine.learning]
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

    None of an unhealthy step (coalign.runtime.guards), unless the run ends there.

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
