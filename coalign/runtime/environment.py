"""The roll-out side of an engine: draws prompts, runs ``env_flow``, keeps the buffer filled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coalign.cluster.future import BatchRef, Future
from coalign.data.loader import Loader
from coalign.runtime.buffer import Buffer, Entry
from coalign.runtime.calls import Calls, watch
from coalign.types import Max, Metric, Stat, Stats, Status, Total


def describe(
    loss_mask: Tensor,
    segment: Tensor,
    lengths: Tensor,
    status: Tensor | None = None,
    versions: Tensor | None = None,
    reward: Tensor | None = None,
    *,
    version: int,
) -> dict[str, Metric]:
    """Metrics of a batch as it leaves its flow: lengths (tokens), endings, age of its weights (versions), rewards."""
    trained = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, segment, loss_mask.long())
    stats: dict[str, Metric] = {
        "tokens/response": Stat.of(trained),
        "tokens/response_max": Max(float(trained.max()) if len(trained) else 0.0),
        "tokens/prompt": Stat.of(lengths - trained),
        "tokens/generated": Total(float(trained.sum())) if versions is not None else Total(0.0),
        "samples/count": Total(float(len(lengths))),
        "samples/empty": Stat.of(trained == 0),
    }
    if status is not None:
        stats["samples/truncated"] = Stat.of(status == int(Status.TRUNCATED))
    if versions is not None:
        stats["samples/staleness"] = Stat.of(version - versions[loss_mask])
    if reward is not None and len(reward):
        stats["reward/mean"] = Stat.of(reward)
        stats["reward/std"] = Stat(float(reward.double().std(unbiased=False)))
        stats["reward/max"] = Max(float(reward.max()))
    return stats


@dataclass
class Rollout:
    """One batch under way: where it will be, the calls that make it, when it was begun."""

    batch: Future
    calls: Calls

    def wait(self) -> tuple[BatchRef, Stats]:
        """(batch, merged metrics of its calls). Raises what a call raised."""
        return self.batch.result(), self.calls.stats()


class Environment:
    """Runs a flow on prompts that a loader draws.

    ``flow(prompts: BatchRef) -> Future`` is the engine's ``env_flow``; it returns before anything is computed.
    """

    def __init__(
        self, cluster: Any, flow: Callable[[BatchRef], Future], loader: Loader, buffer: Buffer[Rollout]
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.loader = loader
        self.buffer = buffer

    def _begin(self, step: int) -> Rollout:
        with watch(self.cluster) as calls:
            batch = self.flow(self.cluster.put(self.loader.next()))
            batch = self.cluster.apply(describe, batch, version=step)
        return Rollout(batch, calls)

    def _restore(self, entry: dict[str, Any]) -> Entry[Rollout]:
        with watch(self.cluster) as calls:
            batch = self.cluster.apply(describe, self.cluster.put(entry["batch"]), version=entry["step"])
        return Entry(entry["step"], entry["version"], Rollout(batch, calls))

    def next(self, version: int) -> tuple[BatchRef, Stats]:
        """The batch that the step at this weight version trains on, and its metrics (`time/rollout`: s waited)."""
        begun = time.perf_counter()
        self.buffer.fill(version, self._begin)
        batch, stats = self.buffer.take(version).wait()
        return batch, {**stats, **self.loader.stats(), "time/rollout": Total(time.perf_counter() - begun)}

    def state_dict(self) -> dict[str, Any]:
        """Cursor and buffered batches. Waits for roll-outs under way: after a restart their weights are gone."""
        buffered = [
            {"step": entry.step, "version": entry.version, "batch": entry.batch.wait()[0].fetch()}
            for entry in self.buffer.entries()
        ]
        return {"loader": self.loader.state_dict(), "buffer": buffered}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue where ``state_dict`` was taken, after ``step`` steps."""
        self.loader.load_state_dict(state["loader"])
        self.buffer.restore(step, [self._restore(entry) for entry in state["buffer"]])
