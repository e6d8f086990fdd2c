"""Bundles of groups that go through `env_flow` together, and the metrics of samples as they leave it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future, WatchedCalls
from coalign.data.batch import Batch
from coalign.engine.rollouts.pool import list_groups
from coalign.engine.rollouts.selection import find_sources
from coalign.engine.rollouts.unfinished import find_oldest_versions
from coalign.types import ENVIRONMENT_KEY, SOURCE_KEY, Max, Metric, Moments, Stat, Stats, Status, Total, merge_stats

METRIC_TYPES = {metric.__name__: metric for metric in get_args(Metric)}


@dataclass
class Bundle:
    """Groups that go through the flow together.

    ``batches`` by name: `groups` (those to train on), and small ones that describe them: `ages` (group_ages),
    `shares` (selection.pass_rates), `lengths` (selection.response_lengths), `samples` (journal.describe_samples). It is
    empty if there was nothing to generate.
    """

    version: int  # the weight version when its prompts were drawn
    target: int = 0  # number of groups that it should give
    prompts: Batch | None = None
    batches: dict[str, Future | BatchRef] = field(default_factory=dict)
    calls: WatchedCalls = field(default_factory=WatchedCalls)
    earlier_stats: Stats = field(default_factory=dict)  # metrics of drawing its prompts, or from before a restart

    def wait(self) -> tuple[dict[str, BatchRef], Stats]:
        """Wait for all calls; return (batches, merged metrics). Raises what a call raised."""
        done = {name: b.result() if isinstance(b, Future) else b for name, b in self.batches.items()}
        return done, merge_stats([self.earlier_stats, self.calls.stats()])

    def is_complete(self) -> bool:
        """Whether its calls were made, and all have ended without an error."""
        if not self.batches and self.prompts is not None:
            return False
        calls = [batch for batch in self.batches.values() if isinstance(batch, Future)]
        return all(call.done() and call.ended.exception() is None for call in calls)

    def list_groups(self) -> list[int]:
        """Return the numbers of its groups, as far as they can be told without waiting."""
        batches = [batch for batch in self.batches.values() if isinstance(batch, BatchRef)]
        columns = [batch.group for batch in batches] + ([self.prompts["group"]] if self.prompts else [])
        return sorted({group for column in columns for group in list_groups(column)})

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: its groups, or the prompts to start again if not all are complete."""
        state = {"target": self.target, "prompts": self.prompts}
        if not self.is_complete():
            return state | {"before": _encode(self.earlier_stats)}
        batches, stats = self.wait()
        fetched = {name: batch.fetch() for name, batch in batches.items()}
        return state | {"version": self.version, "batches": fetched, "before": _encode(stats)}


def _encode(stats: Stats) -> dict[str, list[Any]]:
    return {name: [type(metric).__name__, *astuple(metric)] for name, metric in stats.items()}


def count(loss_mask: Tensor, versions: Tensor | None = None, reward: Tensor | None = None) -> dict[str, Metric]:
    """Metrics of one rollout as it leaves its flow, before any filter."""
    stats: dict[str, Metric] = {
        "tokens/generated": Total(float(loss_mask.sum()) if versions is not None else 0.0),
    }
    if reward is not None:
        stats["rollout/reward"] = Stat.of(reward)
    return stats


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
    """Metrics of a batch that is trained on: lengths (tokens), statuses, staleness (versions), rewards."""
    trained = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, segment, loss_mask.long())
    stats: dict[str, Metric] = {
        "tokens/response": Stat.of(trained),
        "tokens/response_max": Max(float(trained.max()) if len(trained) else 0.0),
        "tokens/prompt": Stat.of(lengths - trained),
        "samples/count": Total(float(len(lengths))),
        "samples/empty": Stat.of(trained == 0),
    }
    if status is not None:
        stats["samples/truncated"] = Stat.of(status == int(Status.TRUNCATED))
    if versions is not None:
        ages = version - versions[loss_mask]
        stats["samples/staleness"] = Stat.of(ages)
        stats["samples/staleness_max"] = Max(float(ages.max()) if len(ages) else 0.0)
    if reward is not None and len(reward):
        stats["reward/mean"] = Stat.of(reward)
        stats["reward/std"] = Moments.of(reward)
        stats["reward/max"] = Max(float(reward.max()))
    return stats


def describe_sources(
    rows: list[dict[str, Any]], group: Tensor, reward: Tensor | None = None, *, by_environment: bool = False
) -> dict[str, Metric]:
    """Metrics of each source, or environment, of a batch that is trained on: samples, groups and mean reward."""
    stats: dict[str, Metric] = {}
    prefix, key = ("episode", ENVIRONMENT_KEY) if by_environment else ("source", SOURCE_KEY)
    for source, is_of_source in find_sources(rows, key).items():
        stats[f"{prefix}/{source}/samples"] = Total(float(is_of_source.sum()))
        stats[f"{prefix}/{source}/groups"] = Total(float(len(group[is_of_source].unique())))
        if reward is not None:
            stats[f"{prefix}/{source}/reward"] = Stat.of(reward, is_of_source & reward.isfinite())
    return stats


def group_ages(batch: Batch, *, default: int) -> Batch:
    """Return one row without tokens for each group; column ``oldest``: see ``find_oldest_versions``."""
    oldest = find_oldest_versions(batch, default=default)
    return Batch(torch.zeros(len(oldest)), {}, {"oldest": oldest})
