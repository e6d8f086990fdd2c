"""Writes a run's metrics and samples: metrics.jsonl, samples.jsonl, rollouts/, the trackers and the step line.

``StructureRecord`` writes the structure of the run for programs that load no torch (`coalign board`): flow.json and
placement.json.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coalign.cluster.dry import FlowGraph, describe_graph
from coalign.cluster.placement.slots import list_models_sharing_devices
from coalign.data.batch import Batch
from coalign.data.templates import read_samples
from coalign.engine.engine import Hook
from coalign.engine.hooks.run_folder import RunFolder, flatten_stats
from coalign.files import Sink, write_text_atomically
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.batch_ref import BatchRef
    from coalign.cluster.cluster import Cluster
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
        self.folder.state.note("running", step=step)
        self.newest = step

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self.write(engine.step, stats)
        for name, count in flatten_stats(stats).items():
            if name.endswith("loss/skipped_updates") and count:
                message = "step %d: %s is %.0f: no weights moved, as there was no token to learn from or a gradient %s"
                log.warning(message, engine.step, name, count, "was not finite")
        if self.samples and engine.source == "prompts":  # nothing else has samples
            shown = batch.fetch(self.samples)
            learned = shown if engine.progress.learned is None else engine.progress.learned.fetch(self.samples)
            self._record_samples(engine, [shown], "train")
            self.folder.rollouts.add(engine.step, [learned], engine.tokenizer)

    def record_evaluation(self, engine: Engine, batches: Sequence[BatchRef]) -> None:
        """Write samples of the same prompts each time, spread evenly over the evaluation set and its sources."""
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
                    **({"branch": sample.branch} if sample.branch else {}),
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
    """Return the cells of a sample's row in a table: texts and numbers."""
    cells = {key: value for key, value in row.items() if key not in ("phase", "versions", "messages")}
    return {k: json.dumps(v, ensure_ascii=False) if isinstance(v, dict | list) else v for k, v in cells.items()}


def describe_placement(cluster: Cluster) -> dict[str, Any]:
    """Return the node and devices of each process, as JSON.

    ``nodes`` are their names. ``models`` has for each model its ``processes`` by rank, each [number of the node, names
    of its devices there] (none: it computes on the CPU), and the models that wait while it computes (``in_turn_with``).
    """
    return {
        "nodes": [node.name for node in cluster.nodes],
        "models": {
            name: {
                "processes": [[process.node, list(process.devices)] for process in processes],
                "in_turn_with": list_models_sharing_devices(cluster.slots, name),
            }
            for name, processes in cluster.placements.items()
        },
    }


class StructureRecord(Hook):
    """Writes flow.json when the run begins, and placement.json then and after each step that changed a placement.

    flow.json has the ``algorithm`` and the ``calls`` of one step (coalign.cluster.dry.describe_graph). placement.json
    is the result of ``describe_placement``, with the ``step`` since which it holds.
    """

    def __init__(self, folder: Path, graph: FlowGraph) -> None:
        self.folder = folder
        self.graph = graph
        self._written: dict[str, Any] | None = None
        self._sink = Sink(f"{folder / 'placement.json'}")

    def begin(self, engine: Engine) -> None:
        flow = {"algorithm": engine.config.algorithm, "calls": describe_graph(self.graph)}
        with self._sink.survive():
            write_text_atomically(self.folder / "flow.json", json.dumps(flow))
        self._write_placement(engine)

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self._write_placement(engine)

    def _write_placement(self, engine: Engine) -> None:
        placement = describe_placement(engine.cluster)
        if placement == self._written:
            return
        with self._sink.survive():
            path = self.folder / "placement.json"
            write_text_atomically(path, json.dumps({"step": engine.step, **placement}))
            self._written = placement
