"""Writes a run's metrics and samples: metrics.jsonl, samples.jsonl, TensorBoard, wandb and the step line."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.config.secrets import hide_secrets
from coalign.data.templates import read_samples
from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import RunFolder, flatten_stats
from coalign.files import RecordFile, Sink
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.config.schema import RunConfig
    from coalign.engine.engine import Engine
    from coalign.report.display import Display


class MetricsRecorder(Hook):
    """Writes one object a step into metrics.jsonl, a few samples into samples.jsonl, and a line on the screen."""

    def __init__(self, folder: RunFolder, display: Display, config: RunConfig) -> None:
        self.folder = folder
        self.display = display
        self.samples = config.runtime.log_samples
        self.newest = 0  # the step recorded last
        self._wandb = self._board = None
        self._wandb_sink = Sink("the metrics in wandb")
        if config.runtime.wandb:
            import wandb  # pyright: ignore[reportMissingImports]  # an optional package

            settings = hide_secrets(config.model_dump())
            self._wandb = wandb.init(project=config.runtime.wandb, name=hide_secrets(config.output), config=settings)
        if config.runtime.tensorboard:
            self._board = TensorBoardFile(folder.path / "tensorboard")

    def write(self, step: int, stats: Stats) -> None:
        """Write the metrics of one step everywhere."""
        numbers = flatten_stats(stats)
        self.folder.metrics.append({"step": step, **dict(sorted(numbers.items()))})
        if self._board:
            self._board.add(step, numbers)
        if self._wandb:
            with self._wandb_sink.survive(Exception):
                self._wandb.log(numbers, step=step)
        self.display.step(step, numbers)
        self.newest = step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self.write(engine.step, stats)
        self.record_samples(engine, batch, "train")

    def record_samples(self, engine: Engine, batch: BatchRef, phase: str) -> None:
        """Write the first few rows of a batch as text. Only prompts have samples."""
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
                    "row": _to_json(sample.meta),
                    **({} if sample.turn_rewards is None else {"messages": _to_json(sample.messages)}),
                }
            )

    def end(self, engine: Engine) -> None:
        if self._wandb:
            with self._wandb_sink.survive(Exception):
                self._wandb.finish()


class TensorBoardFile:
    """An event file of TensorBoard. It is written here, because torch's writer ends at the first error of the disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        now = time.time()
        self._file = RecordFile(folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}")
        self._append(wall_time=now, file_version="brain.Event:2")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        values = [{"tag": name, "simple_value": number} for name, number in numbers.items()]
        self._append(wall_time=time.time(), step=step, summary={"value": values})

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(**fields).SerializeToString())
        self._file.append(record.getvalue())


def _to_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
