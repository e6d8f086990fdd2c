"""What a checkpoint of an engine holds, when one is taken, and how a run goes on from one."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coalign.data.batch import Batch
from coalign.runtime.checkpoint import Checkpoints
from coalign.runtime.hooks import Hook
from coalign.types import Stats, Total

if TYPE_CHECKING:
    from coalign.runtime.engine import Engine

log = logging.getLogger(__name__)


def fill(engine: Engine, directory: Path, extra: dict[str, Any]) -> None:
    """Write everything that ``restore`` reads, `hf/`, and `adapter/` of a model with adapters."""
    environment = engine.environment.state_dict()
    state = {
        "step": engine.step,
        "algorithm": engine.config.algorithm,
        "loader": environment["loader"],
        "recipe": engine.state_dict(),
        **extra,
    }
    (directory / "state.json").write_text(json.dumps(state, indent=1))
    buffered = [
        {
            **e,
            "batch": {
                "lengths": e["batch"].lengths,
                "token": dict(e["batch"].token),
                "sequence": dict(e["batch"].sequence),
            },
        }
        for e in environment["buffer"]
    ]
    torch.save(buffered, directory / "buffer.pt")
    saves = []
    for i, name in enumerate(engine.learning):
        model = engine.models_running[name]
        saves.append(model.save(str(directory / "models" / name)))
        saves.append(model.save_hf(str(directory / ("hf" if i == 0 else f"hf_{name}"))))
        if model.config.lora:
            saves.append(model.save_adapter(str(directory / ("adapter" if i == 0 else f"adapter_{name}"))))
    for save in saves:
        save.result()


def restore(engine: Engine, directory: Path) -> dict[str, Any]:
    """Continue from a checkpoint; returns its state.json. ValueError if it is of another recipe."""
    state = json.loads((directory / "state.json").read_text())
    if state["algorithm"] != engine.config.algorithm:
        raise ValueError(f"{directory} is of a `{state['algorithm']}` run; this one is `{engine.config.algorithm}`")
    loads = [engine.models_running[name].load(str(directory / "models" / name)) for name in engine.learning]
    for load in loads:
        load.result()
    engine.step = state["step"]
    engine.environment.buffer.begun = engine.step
    buffered = [{**e, "batch": Batch(**e["batch"])} for e in torch.load(directory / "buffer.pt", weights_only=True)]
    engine.environment.load_state_dict({"loader": state["loader"], "buffer": buffered})
    engine.load_state_dict(state["recipe"])
    return state


class Save(Hook):
    """Takes a checkpoint every ``every`` steps, at the end, and when the loop is asked to stop.

    A checkpoint that cannot be written does not end the run: it goes on with the last good one and says so. Whatever
    the reason: writers of tensors report a full disk by errors of their own. Only the first checkpoint (a run that
    cannot save should not go on) and the last one must succeed.
    """

    def __init__(self, checkpoints: Checkpoints, every: int, best: str | None) -> None:
        self.checkpoints = checkpoints
        self.every = every
        self.metric = best
        self.best: tuple[float, int] | None = None

    def after_step(self, engine: Engine, stats: Stats, batch: Any) -> None:
        last = engine.step == engine.last or engine.stop is not None
        if self.metric and self.metric in stats and (self.best is None or stats[self.metric].value > self.best[0]):
            self.best = (stats[self.metric].value, engine.step)
        best_now = self.best is not None and self.best[1] == engine.step
        if not (last or best_now or (self.every and engine.step % self.every == 0)):
            return
        try:
            self.checkpoints.write(engine.step, lambda d: fill(engine, d, {"best": self.best}))
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
            self.checkpoints.prune(self.best[1] if self.best else None)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back the best metric seen so far from a restored state.json."""
        if state.get("best"):
            self.best = (state["best"][0], state["best"][1])
