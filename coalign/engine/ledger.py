"""Samples on their way: what a roll-out leaves unfinished, the next one goes on with; nothing is lost or done twice.

With `rollout.round_tokens` a response grows by at most that many tokens in one roll-out; with `rollout.oversample` a
roll-out ends once enough groups are complete. Complete groups are handed on. What is not complete is carried on, under
the weights of then (its tokens keep the log-probs and versions that they were chosen with), or, without
`round_tokens`, dropped and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.backends.engines.samples import begin_samples
from coalign.cluster.future import BatchRef, Future
from coalign.config.schema.rollout import RolloutConfig
from coalign.data.batch import Batch
from coalign.engine.metrics import find_oldest_versions
from coalign.types import Max, Stats, Status, Total

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.roles import Rollout


class Ledger:
    """Keeps the unfinished groups of one policy between roll-outs. Nothing here waits for a roll-out under way, but for
    ``carried`` and ``state_dict``."""

    def __init__(self, cluster: Cluster, config: RolloutConfig, samples: int) -> None:
        self.cluster = cluster
        self.config = config
        self.samples = samples  # of each prompt
        self.carries = config.round_tokens is not None
        self.since = 0  # groups with tokens of an older version than this are given up
        self.min_complete: float | None = None  # the share of groups that ends the next roll-out
        self.calls = 0
        self._unfinished: BatchRef | Future | None = None

    @property
    def active(self) -> bool:
        """Whether a roll-out may leave something unfinished."""
        return self.carries or self.config.oversample > 1

    @property
    def carried(self) -> int:
        """Groups that the next roll-out goes on with."""
        if self._unfinished is None:
            return 0
        ref: BatchRef = self.cluster.resolve(self._unfinished)
        return len(torch.unique(ref.group)) if len(ref) else 0

    def generate(self, policy: DistModel[Rollout], prompts: BatchRef | Future, **sampling: Any) -> Future:
        """Complete groups, of ``prompts`` and of those begun before."""
        self.calls += 1
        if policy.config.spread_samples and self._unfinished is None:  # to be dealt out, samples have to be there
            prompts = self.cluster.transform(begin_samples, prompts, samples=sampling.pop("samples", self.samples))
        if not self.active:
            return policy.generate(prompts, **sampling)
        if self._unfinished is not None:
            options = {"samples": self.samples, "since": self.since}
            prompts = self.cluster.transform(go_on, self._unfinished, prompts, **options)
        out = policy.generate(
            prompts, round_tokens=self.config.round_tokens, min_complete=self.min_complete, **sampling
        )
        if self.carries:
            self._unfinished = self.cluster.transform(unfinished_groups, out)
        return self.cluster.transform(complete_groups, out, carried=self.carries)

    def check(self) -> None:
        """Refuse (ValueError) a flow that did not generate by this once since the last check."""
        calls, self.calls = self.calls, 0
        if self.active and calls != 1:
            raise ValueError(
                f"rollout: `round_tokens` and `oversample` need an env_flow that calls `self.generate(prompts)` once; "
                f"this one calls it {calls} times (`self.policy.generate` knows nothing of them)"
            )

    def state_dict(self) -> Batch | None:
        """The unfinished groups."""
        return None if self._unfinished is None else self.cluster.resolve(self._unfinished).fetch()

    def load_state_dict(self, state: Batch | None) -> None:
        """Take back what ``state_dict`` gave."""
        self._unfinished = None if state is None else self.cluster.put(state)


def go_on(unfinished: Batch, prompts: Batch, *, samples: int, since: int) -> tuple[Batch, Stats]:
    """Samples to go on with, oldest first, and ``samples`` new ones of each prompt.

    Groups with a token older than version ``since`` are given up: rollout/given_up, in groups, and its tokens.
    """
    _, member = torch.unique_consecutive(unfinished["group"], return_inverse=True)
    old = (find_oldest_versions(unfinished, default=since) < since)[member]
    stats = count_dropped(unfinished.select(old), "given_up") if bool(old.any()) else {}
    rest = unfinished.select(~old)
    if "expected_tokens" in rest:  # what has ended is no work
        ended = rest["status"] != Status.PARTIAL
        rest = rest.with_(expected_tokens=rest["expected_tokens"].masked_fill(ended, 0))
    return Batch.concat([rest, begin_samples(prompts, samples)]), stats


def complete_groups(samples: Batch, *, carried: bool) -> tuple[Batch, Stats]:
    """The groups that are at their end; without ``carried`` the others are dropped: rollout/cut."""
    waiting = _waiting(samples)
    stats = {} if carried else count_dropped(samples.select(waiting), "cut")
    return samples.select(~waiting), stats


def unfinished_groups(samples: Batch) -> tuple[Batch, Stats]:
    """The groups of which a sample is not at its end, with those of their samples that are. rollout/carried: groups."""
    rest = samples.select(_waiting(samples))
    return rest, {"rollout/carried": Max(float(len(torch.unique(rest["group"]))))}


def count_dropped(samples: Batch, why: str) -> Stats:
    """rollout/<why>: groups that nobody trains on; rollout/<why>_tokens: what had been generated of them."""
    return {
        f"rollout/{why}": Total(float(len(torch.unique(samples["group"])))),
        f"rollout/{why}_tokens": Total(float(samples["loss_mask"].sum())),
    }


def _waiting(samples: Batch) -> Tensor:
    """bool[N]: the sample's group has one that is not at its end."""
    groups, member = torch.unique(samples["group"], return_inverse=True)
    waiting = torch.zeros(len(groups), dtype=torch.bool)
    waiting[member[samples["status"] == Status.PARTIAL]] = True
    return waiting[member]
