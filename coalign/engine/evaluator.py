"""Evaluates a model on prompts that it does not learn from: mean reward, pass@k, length of responses."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from math import comb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import WatchedCalls
from coalign.data.loader import Loader
from coalign.rewards.calls import RewardError
from coalign.types import Metric, Stat, Stats, Total, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.report.display import Display


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Return the probability that one of k samples drawn from n without replacement is right (2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def score(
    reward: Tensor, group: Tensor, loss_mask: Tensor, *, prompts: int, samples: int, solved: float = 1.0
) -> dict[str, Metric]:
    """mean@n, pass@k for k = 1, 2, 4, … n, and response length; a sample with reward >= ``solved`` is right.

    n is ``samples``, the number requested for each of ``prompts``. Failed samples are not among the rows: they are
    counted in `samples/dropped`, excluded from means, and wrong in pass@k.
    """
    scored = len(reward)
    stats: dict[str, Metric] = {
        "response_tokens": Stat(float(loss_mask.sum()), float(scored)),
        "samples/count": Total(float(scored)),
        "samples/dropped": Total(float(prompts * samples - scored)),
    }
    stats[f"mean@{samples}"] = stats["mean"] = Stat.of(reward)
    _, member = torch.unique(group, return_inverse=True)
    right = torch.bincount(member, weights=(reward >= solved).double()).long().tolist()
    k = 1
    while samples > 1 and k <= samples:
        stats[f"pass@{k}"] = Stat(sum(pass_at_k(count, samples, k) for count in right), float(prompts))
        k *= 2
    return stats


class Evaluator:
    """Runs ``flow(prompts) -> Future`` (an engine's ``eval_flow``) over an evaluation set.

    ``on_wait()`` is called every second while ``evaluate`` waits for results.
    """

    def __init__(
        self,
        cluster: Cluster,
        flow: Callable[[BatchRef], Any],
        loader: Loader,
        limit: int | None,
        on_wait: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self.on_wait = on_wait
        self.flow = flow
        self.loader = loader
        self.limit = limit

    def evaluate(self, display: Display | None = None) -> tuple[Stats, list[BatchRef]]:
        """Evaluate all prompts; return the metrics, named `eval/…`, and the batches that the flow returned.

        With several sources each source also has metrics, named `eval/<source>/…`. ``display`` shows a progress bar.
        Raises RewardError if every sample has failed.
        """
        started_at = time.perf_counter()
        futures, calls_by_source, results = [], dict[str, list[WatchedCalls]](), []
        for source, prompts in self.loader.all(self.limit):
            # Negative groups, so that these prompts never share random numbers with training prompts.
            prompts = prompts.with_(group=-1 - prompts["group"])
            with self.cluster.watch() as calls:
                futures.append((len(prompts), self.flow(self.cluster.put(prompts))))
            calls_by_source.setdefault(source, []).append(calls)
        total = sum(rows for rows, _ in futures)
        with display.progress("evaluating", total) if display else nullcontext(lambda rows: None) as advance:
            for rows, future in futures:
                future.wait(self.on_wait)
                results.append(future.result())
                advance(rows)
        by_source = {name: merge_stats(calls.stats() for calls in made) for name, made in calls_by_source.items()}
        together = merge_stats(by_source.values())
        if "samples/count" in together and not together["samples/count"].value:
            lost = together["samples/dropped"].value
            raise RewardError(f"evaluation: none of {lost:.0f} samples has a reward; a warning above says why")
        named = [(f"eval/{name}/", stats) for name, stats in by_source.items() if len(by_source) > 1]
        stats = {
            prefix + name: metric
            for prefix, metrics in (*named, ("eval/", together))
            for name, metric in metrics.items()
            if not name.startswith(("time/", "memory/", "tokens/", "engine/"))
        }
        return {**stats, "time/eval": Total(time.perf_counter() - started_at)}, results
