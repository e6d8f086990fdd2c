"""Writes a run's metrics and samples: metrics.jsonl, samples.jsonl, rollouts/, the trackers and the step line."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from coalign.data.batch import Batch
from coalign.data.templates import read_samples
from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import RunFolder, flatten_stats
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.config.schema import RunConfig
    from coalign.engine.engine import Engine
    from coalign.report.display import Display
    from coalign.report.trackers import TrackerFeed

log = logging.getLogger(__name__)


class MetricsRecorder(Hook):
    """Writes one object a step into metrics.jsonl, a few samples into samples.jsonl, and a line on the screen."""

    def __init__(self, folder: RunFolder, display: Display, config: RunConfig) -> None:
        self.folder = folder
        self.display = display
        self.samples = config.runtime.log_samples
        self.newest = 0  # the step recorded last
        self.trackers: list[TrackerFeed] = []

    def write(self, step: int, stats: Stats) -> None:
        """Write the metrics of one step everywhere."""
        numbers = flatten_stats(stats)
        self.folder.metrics.append({"step": step, **dict(sorted(numbers.items()))})
        if self.newest >= step > 0:  # after a rollback
            self._send("rewind", step - 1)
        self._send("log", numbers, step)
        self.display.step(step, numbers)
        self.newest = step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self.write(engine.step, stats)
        for name, count in flatten_stats(stats).items():
            if name.endswith("loss/skipped_updates") and count:
                message = "step %d: %s is %.0f: no weights moved, as there was no token to learn from or a gradient %s"
                log.warning(message, engine.step, name, count, "was not finite")
        if self.samples and engine.source == "prompts":  # nothing else has samples
            shown = batch.fetch(self.samples)
            learned = shown if engine.learned is None else engine.learned.fetch(self.samples)
            self._record_samples(engine, [shown], "train")
            self.folder.rollouts.add(engine.step, [learned], engine.tokenizer)

    def record_evaluation(self, engine: Engine, batches: Sequence[BatchRef]) -> None:
        """Write samples spread evenly over the evaluation set, so over its sources; the same prompts each time."""
        if not self.samples or engine.source != "prompts":
            return
        every = max(1, math.ceil(sum(map(len, batches)) / self.samples))
        spread, start = [], 0
        for batch in batches:
            rows = torch.arange(len(batch))[-start % every :: every]
            start += len(batch)
            if len(rows):
                spread.append(batch.select(rows).fetch())
        self._record_samples(engine, spread, "eval")
        self.folder.rollouts.add(engine.step, spread, engine.tokenizer)

    def _record_samples(self, engine: Engine, batches: Sequence[Batch], phase: str) -> None:
        rows = []
        for sample in chain.from_iterable(read_samples(batch, engine.tokenizer) for batch in batches):
            rows.append(
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
                    **({"images": list(dict.fromkeys(span.path for span in sample.images))} if sample.images else {}),
                    **({} if sample.turn_rewards is None else {"messages": _to_json(sample.messages)}),
                }
            )
            self.folder.samples.append(rows[-1])
        if rows:
            self._send("log_samples", f"samples/{phase}", [_to_cells(row) for row in rows], engine.step)

    def close(self, failed: bool) -> None:
        """End the run at its trackers."""
        for tracker in self.trackers:
            tracker.close(failed)

    def _send(self, method: str, *arguments: Any) -> None:
        for tracker in self.trackers:
            tracker.send(methodcaller(method, *arguments))


def _to_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _to_cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a table shows of a sample: texts and numbers."""
    cells = {key: value for key, value in row.items() if key not in ("phase", "versions", "messages")}
    return {k: json.dumps(v, ensure_ascii=False) if isinstance(v, dict | list) else v for k, v in cells.items()}
