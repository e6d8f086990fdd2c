"""Collects the metrics of the calls that a flow makes, and computes those of roll-outs and batches from columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.cluster.future import Future
from coalign.data.batch import Batch
from coalign.types import SOURCE_KEY, Max, Metric, Stat, Stats, Status, Total, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster


class WatchedCalls:
    """The Futures of the calls made while watching, in order."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def stats(self, main: str | None = None) -> Stats:
        """Wait for every call; return their metrics, `time/<model.method>` (s) and `memory/<model>` (MiB, peak).

        With ``main``, the metrics of every other model get its name as a prefix (`value/loss/grad_norm`), so that two
        models that learn are not averaged. Metrics of functions get none.
        """
        parts: list[dict[str, Metric]] = []
        for future in self.futures:
            future.result()
            model = future.call.model
            mine = main is None or model is None or model == main
            parts.append(dict(future.stats) if mine else {f"{model}/{k}": v for k, v in future.stats.items()})
            parts.append({f"time/{future.call}": Total(future.seconds)})
            if model:
                parts.append({f"memory/{model}": Max(future.peak_memory / 2**20)})
        return merge_stats(parts)


@contextmanager
def watch(cluster: Cluster) -> Iterator[WatchedCalls]:
    """Collect the calls that are made on ``cluster`` inside the block (on this thread; blocks do not nest)."""
    calls = WatchedCalls()
    cluster.on_call = calls.futures.append
    try:
        yield calls
    finally:
        cluster.on_call = None


def count(loss_mask: Tensor, versions: Tensor | None = None, reward: Tensor | None = None) -> dict[str, Metric]:
    """Metrics of one roll-out as it leaves its flow, before any filter."""
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
    """Metrics of a batch as it is trained on: lengths (tokens), endings, age of its weights (versions), rewards."""
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
        stats["reward/std"] = Stat(float(reward.double().std(unbiased=False)))
        stats["reward/max"] = Max(float(reward.max()))
    return stats


def describe_sources(rows: list[dict[str, Any]], group: Tensor, reward: Tensor | None = None) -> dict[str, Metric]:
    """Metrics of each source of a batch that is trained on: samples, groups and mean reward."""
    stats: dict[str, Metric] = {}
    for source, own in find_sources(rows).items():
        stats[f"source/{source}/samples"] = Total(float(own.sum()))
        stats[f"source/{source}/groups"] = Total(float(len(group[own].unique())))
        if reward is not None:
            stats[f"source/{source}/reward"] = Stat.of(reward, own & reward.isfinite())
    return stats


def find_sources(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return for each source which rows are of it, bool[N]."""
    names = [row.get(SOURCE_KEY, "") for row in rows]
    return {source: torch.tensor([name == source for name in names]) for source in sorted(set(names))}


def find_oldest_versions(batch: Batch, *, default: int) -> Tensor:
    """Return i64[G]: the oldest weight version that chose a token of each group.

    Groups are runs of equal neighbours, in their order; one without a chosen token gets ``default``.
    """
    _, member = torch.unique_consecutive(batch["group"], return_inverse=True)
    never = torch.iinfo(torch.int64).max
    oldest = torch.full((int(member[-1]) + 1 if len(member) else 0,), never)
    chosen = batch["versions"] >= 0
    oldest.scatter_reduce_(0, member[batch.segment[chosen]], batch["versions"][chosen].long(), "amin")
    return oldest.masked_fill(oldest == never, default)


def group_ages(batch: Batch, *, default: int) -> Batch:
    """Return one row without tokens for each group; column ``oldest``: see ``find_oldest_versions``."""
    oldest = find_oldest_versions(batch, default=default)
    return Batch(torch.zeros(len(oldest)), {}, {"oldest": oldest})
