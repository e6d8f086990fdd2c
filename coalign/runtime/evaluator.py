"""The evaluation side of an engine: mean@n and pass@k over a held-out set, or whatever ``eval_flow`` measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import comb
from typing import Any

import torch
from torch import Tensor

from coalign.cluster.future import BatchRef
from coalign.data.loader import Loader
from coalign.runtime.calls import watch
from coalign.types import Metric, Stat, Stats, Total, merge_stats


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Probability that at least one of k samples drawn from n without replacement is right (2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def score(
    reward: Tensor, group: Tensor, loss_mask: Tensor, segment: Tensor, *, solved: float = 1.0
) -> dict[str, Metric]:
    """mean@n, pass@k for k = 1, 2, 4, … n, and response length; a sample with reward >= ``solved`` is right."""
    stats: dict[str, Metric] = {"response_tokens": Stat(float(loss_mask.sum()), float(len(reward)))}
    _, member, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    right = torch.zeros(len(sizes), dtype=torch.int64).index_add_(0, member, (reward >= solved).long())
    n = int(sizes.max()) if len(sizes) else 0
    stats[f"mean@{n}"] = stats["mean"] = Stat.of(reward)
    k = 1
    while n > 1 and k <= n:
        rates = [pass_at_k(c, size, k) for c, size in zip(right.tolist(), sizes.tolist(), strict=True) if size >= k]
        stats[f"pass@{k}"] = Stat(sum(rates), len(rates))
        k *= 2
    return stats


class Evaluator:
    """Runs ``flow(prompts) -> Future`` (an engine's ``eval_flow``) over a whole evaluation set."""

    def __init__(self, cluster: Any, flow: Callable[[BatchRef], Any], loader: Loader, limit: int | None) -> None:
        self.cluster = cluster
        self.flow = flow
        self.loader = loader
        self.limit = limit

    def evaluate(self) -> tuple[Stats, list[BatchRef]]:
        """(metrics named `eval/…`, the batches as their flow left them)."""
        begun = time.perf_counter()
        with watch(self.cluster) as calls:
            futures = [self.flow(self.cluster.put(self._apart(prompts))) for prompts in self.loader.all(self.limit)]
        results = [future.result() for future in futures]
        stats = {
            f"eval/{name}": metric
            for name, metric in calls.stats().items()
            if not name.startswith(("time/", "memory/", "tokens/", "engine/"))
        }
        return merge_stats([stats, {"time/eval": Total(time.perf_counter() - begun)}]), results

    @staticmethod
    def _apart(prompts: Any) -> Any:
        """Evaluation prompts get negative groups, so that they never share random numbers with training prompts."""
        return prompts.with_(group=-1 - prompts["group"])
