"""Writes what a run measures and makes: metrics.jsonl, samples.jsonl, tensorboard, wandb, the step line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from coalign.data.templates import read_samples
from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import RunFolder, flatten
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.engine.engine import Engine
    from coalign.report.display import Display


class Record(Hook):
    """One object a step into metrics.jsonl, a few samples into samples.jsonl, a line on the screen."""

    def __init__(self, folder: RunFolder, display: Display, config: Any) -> None:
        self.folder = folder
        self.display = display
        self.samples = config.runtime.log_samples
        self._wandb = _wandb(config) if config.runtime.wandb else None
        self._board = _tensorboard(folder) if config.runtime.tensorboard else None

    def write(self, step: int, stats: Stats) -> None:
        """Metrics of one step, everywhere."""
        numbers = flatten(stats)
        self.folder.metrics.append({"step": step, **dict(sorted(numbers.items()))})
        for name, number in numbers.items():
            if self._board:
                self._board.add_scalar(name, number, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)
        self.display.step(step, numbers)

    def after_step(self, engine: Engine, stats: Stats, batch: Any) -> None:
        self.write(engine.step, stats)
        self.record_samples(engine, batch, "train")

    def record_samples(self, engine: Engine, batch: Any, phase: str) -> None:
        """The first few rows of a batch, as people read them."""
        if not self.samples or engine.source != "prompts":
            return
        for sample in read_samples(batch.fetch(rows=self.samples), engine.tokenizer):
            self.folder.samples.append(
                {
                    "step": engine.step,
                    "phase": phase,
                    "group": sample.group,
                    "index": sample.index,
                    "prompt": sample.prompt,
                    "response": sample.response,
                    "reward": sample.reward,
                    "rewards": sample.rewards,
                    "status": sample.status.name.lower(),
                    "versions": [list(pair) for pair in sample.versions],
                    "row": _jsonable(sample.meta),
                    **({} if sample.turn_rewards is None else {"messages": _jsonable(sample.messages)}),
                }
            )

    def end(self, engine: Engine) -> None:
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _tensorboard(folder: RunFolder) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / "tensorboard"))


def _wandb(config: Any) -> Any:
    import wandb

    return wandb.init(project=config.runtime.wandb, name=config.output, config=config.model_dump())
