"""What a rollout does with samples that are not finished at its end.

A run has ``CompleteGroups``, whose rollouts leave none, or ``UnfinishedGroups``, which keeps samples between the
rollouts of synchronous training: with `rollout.round_tokens` a response grows by at most that many tokens in one
rollout, and the next one continues it. With `rollout.oversample` a rollout ends once the minimum of groups is complete.
Complete groups go to the flow. Incomplete ones are continued by the weights of the next rollout (their tokens keep the
log-probs and versions they were sampled with); without `round_tokens` they are dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.backends.engines.request import begin_samples
from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.config.schema.rollout import RolloutConfig
from coalign.data.batch import Batch
from coalign.engine.rollouts.pool import list_groups
from coalign.types import Max, Stats, Status, Total

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.engine.rollouts.finished_rollouts import FinishedRollouts
    from coalign.roles import Rollout

log = logging.getLogger(__name__)


class CompleteGroups:
    """Generates for `env_flow` in a run whose rollouts leave nothing for the next one."""

    active = False  # whether a rollout may leave something unfinished
    continues = False  # whether the next rollout continues unfinished groups
    continued_groups = 0  # how many it continues
    oldest_version = 0  # groups with older tokens than this are given up
    min_complete: float | None = None  # the share of groups that ends the next rollout
    rolling_out = False  # whether `env_flow` is running
    finished: FinishedRollouts | None = None

    def __init__(self, cluster: Cluster, config: RolloutConfig, samples: int) -> None:
        self.cluster, self.config = cluster, config
        self.samples = samples  # per prompt

    def reuse(self, finished: FinishedRollouts) -> None:
        """Keep what calls of ``generate`` return there, and take from there what an earlier run has generated."""
        self.finished = finished

    def list_continued(self) -> set[int] | None:
        """Return the numbers of the groups that the next rollout continues; None if that is not known yet."""
        return set()

    def generate(self, policy: DistModel[Rollout], prompts: BatchRef | Future, **sampling: Any) -> Future:
        """Generate for ``prompts``; the result holds complete groups."""
        if policy.config.spread_samples:  # over replicas, which splits groups
            return policy.generate(self.cluster.transform(begin_samples, prompts, samples=self.samples), **sampling)
        record = None if self.finished is None else self.finished.open_call(sampling)
        return policy.generate(prompts, record=record, **sampling)

    @contextmanager
    def roll_out(self) -> Iterator[None]:
        """Run `env_flow` in this context."""
        self.rolling_out = True
        try:
            yield
        finally:
            self.rolling_out = False

    def snapshot(self) -> BatchRef | Future | None:
        """Return a reference to the unfinished groups, of which the current rollout may not have ended."""

    def restore(self, unfinished: Batch | None) -> None:
        """Continue with these unfinished groups; a run that leaves none unfinished drops them."""
        if unfinished is not None and len(unfinished):
            text = "%d unfinished groups of the checkpoint are dropped: `rollout` continues none any more"
            log.warning(text, len(list_groups(unfinished["group"])))


class UnfinishedGroups(CompleteGroups):
    """Keeps the groups that a rollout of the policy leaves unfinished. ``continued_groups`` alone waits for it."""

    active = True

    def __init__(self, cluster: Cluster, config: RolloutConfig, samples: int) -> None:
        super().__init__(cluster, config, samples)
        self.continues = config.round_tokens is not None
        self.calls = 0
        self._unfinished: BatchRef | Future | None = None

    @property
    def continued_groups(self) -> int:
        return len(self._list_groups())

    def list_continued(self) -> set[int] | None:
        is_running = isinstance(self._unfinished, Future) and not self._unfinished.done()
        return None if is_running else self._list_groups()

    def _list_groups(self) -> set[int]:
        return set() if self._unfinished is None else set(list_groups(self.cluster.resolve(self._unfinished).group))

    def generate(self, policy: DistModel[Rollout], prompts: BatchRef | Future, **sampling: Any) -> Future:
        """Generate for ``prompts`` and continue unfinished groups; the result holds the complete groups."""
        self.calls += 1
        if self._unfinished is not None:
            options = {"samples": self.samples, "oldest_version": self.oldest_version}
            prompts = self.cluster.transform(_continue_groups, self._unfinished, prompts, **options)
        elif policy.config.spread_samples:
            prompts = self.cluster.transform(begin_samples, prompts, samples=self.samples)
        limits = {"round_tokens": self.config.round_tokens, "min_complete": self.min_complete}
        out = policy.generate(prompts, **limits, **sampling)
        if self.continues:
            self._unfinished = self.cluster.transform(_unfinished_groups, out)
        return self.cluster.transform(_complete_groups, out, continues=self.continues)

    @contextmanager
    def roll_out(self) -> Iterator[None]:
        """ValueError at its end if the flow did not generate exactly once."""
        self.calls = 0
        with super().roll_out():
            yield
        if self.calls != 1:
            raise ValueError(
                "rollout: `round_tokens` and `oversample` need an env_flow that calls `self.policy.generate(prompts)` "
                f"once; this one calls it {self.calls} times (calls that name `samples` do not count)"
            )

    def snapshot(self) -> BatchRef | Future | None:
        return self._unfinished

    def restore(self, unfinished: Batch | None) -> None:
        self._unfinished = None if unfinished is None else self.cluster.put(unfinished)


def _continue_groups(unfinished: Batch, prompts: Batch, *, samples: int, oldest_version: int) -> tuple[Batch, Stats]:
    """Put ``samples`` new samples of each prompt after the unfinished ones, which come oldest first.

    Groups with a token older than ``oldest_version`` are dropped. Metrics: rollout/given_up (groups),
    rollout/given_up_tokens.
    """
    _, member = torch.unique_consecutive(unfinished["group"], return_inverse=True)
    old = (find_oldest_versions(unfinished, default=oldest_version) < oldest_version)[member]
    stats = _count_dropped(unfinished.select(old), "given_up") if bool(old.any()) else {}
    rest = unfinished.select(~old)
    if "expected_tokens" in rest:  # ended samples need no more
        ended = rest["status"] != Status.PARTIAL
        rest = rest.with_(expected_tokens=rest["expected_tokens"].masked_fill(ended, 0))
    return Batch.concat([rest, begin_samples(prompts, samples)]), stats


def _complete_groups(samples: Batch, *, continues: bool) -> tuple[Batch, Stats]:
    """Keep the complete groups. Others count as dropped (rollout/cut), unless the next rollout ``continues`` them."""
    waiting = _find_unfinished(samples)
    stats = {} if continues else _count_dropped(samples.select(waiting), "cut")
    return samples.select(~waiting), stats


def _unfinished_groups(samples: Batch) -> tuple[Batch, Stats]:
    """Keep the groups with an unfinished sample, their finished samples included. rollout/carried: groups."""
    rest = samples.select(_find_unfinished(samples))
    return rest, {"rollout/carried": Max(float(len(torch.unique(rest["group"]))))}


def _count_dropped(samples: Batch, why: str) -> Stats:
    """Count dropped samples: rollout/<why> in groups, rollout/<why>_tokens in generated tokens."""
    return {
        f"rollout/{why}": Total(float(len(torch.unique(samples["group"])))),
        f"rollout/{why}_tokens": Total(float(samples["loss_mask"].sum())),
    }


def _find_unfinished(samples: Batch) -> Tensor:
    """Return bool[N]: whether the sample's group has an unfinished one."""
    return torch.isin(samples["group"], samples["group"][samples["status"] == Status.PARTIAL])


def find_oldest_versions(batch: Batch, *, default: int) -> Tensor:
    """Return i64[G]: the oldest weight version that sampled a token of each group.

    Groups are runs of equal neighbours, in their order; one without a sampled token gets ``default``.
    """
    _, member = torch.unique_consecutive(batch["group"], return_inverse=True)
    never = torch.iinfo(torch.int64).max
    oldest = torch.full((int(member[-1]) + 1 if len(member) else 0,), never)
    chosen = batch["versions"] >= 0
    oldest.scatter_reduce_(0, member[batch.segment[chosen]], batch["versions"][chosen].long(), "amin")
    return oldest.masked_fill(oldest == never, default)
