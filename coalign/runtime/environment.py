"""The roll-out side of an engine: draws prompts, runs ``env_flow``, and gives each step the groups it trains on.

A round is one run of the flow. Its groups pass the filter and wait in the pool; a step takes the oldest
``prompts_per_step`` of them, and where some are missing further rounds are run on the next prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from coalign.cluster.future import BatchRef, Future
from coalign.data.loader import Loader
from coalign.runtime.buffer import Buffer, Entry
from coalign.runtime.calls import watch
from coalign.runtime.describe import count, describe
from coalign.runtime.filtering import filter_groups
from coalign.runtime.pool import Pool, Ready
from coalign.runtime.replay import Replay
from coalign.runtime.round import Round
from coalign.types import Stats, Total, merge_stats

LEAST_KEPT = 0.25  # a round is at most this many times larger than what is missing: memory and the age of a surplus


class Environment:
    """Runs a flow on prompts that a loader draws.

    ``flow(prompts: BatchRef) -> Future`` is the engine's ``env_flow``; it returns before anything is computed.
    ``wanted``: groups of a step (None: whatever one round gives). ``max_age``: weight versions that a group may wait.
    """

    def __init__(
        self,
        cluster: Any,
        flow: Callable[[BatchRef], Future],
        loader: Loader,
        buffer: Buffer[Round],
        *,
        wanted: int | None = None,
        max_rounds: int = 1,
        keep: partial[Any] | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.loader = loader
        self.buffer = buffer
        self.wanted = wanted
        self.max_rounds = max_rounds
        self.keep = keep
        self.replay = replay
        self.pool = Pool(buffer.max_staleness)
        self.kept = 1.0  # the share of groups that the filter let through in the step before

    def next(self, version: int) -> tuple[BatchRef, Stats]:
        """The batch that the step at this weight version trains on, and its metrics (`time/rollout`: s waited).

        RuntimeError if no group is left to train on.
        """
        begun = time.perf_counter()
        expired = self.pool.expire(version)
        self.buffer.fill(version, lambda step: self._begin(version, self._aim()))
        parts = [self._collect(self.buffer.take(version))]
        while self._missing and len(parts) < self.max_rounds:
            parts.append(self._collect(self._begin(version, self._missing)))
        stats = merge_stats(parts)
        self._note_kept(stats)
        batch, described = self._taken(version, stats)
        counts: Stats = {"rollout/rounds": Total(len(parts)), "time/rollout": Total(time.perf_counter() - begun)}
        if self.wanted is not None:
            counts |= {"rollout/expired": Total(expired), "rollout/waiting": Total(len(self.pool))}
        return batch, {**stats, **described, **self.loader.stats(), **counts}

    # ---- one round -------------------------------------------------------------------------------------------------

    @property
    def _missing(self) -> int:
        """Groups that the step at hand lacks."""
        return 0 if self.wanted is None else max(0, self.wanted - len(self.pool))

    def _aim(self) -> int:
        """Groups hoped for from the round of the step after all those begun."""
        if self.wanted is None:
            return 0
        under_way = [entry.batch.aim for entry in self.buffer.entries()]
        return max(0, self.wanted * (len(under_way) + 1) - len(self.pool) - sum(under_way))

    def _begin(self, version: int, aim: int) -> Round:
        """Run the flow on as many prompts as promise ``aim`` groups, by what the filter kept of late."""
        rows = None if self.wanted is None else math.ceil(aim / max(self.kept, LEAST_KEPT))
        if rows == 0:
            return Round(version)
        with watch(self.cluster) as calls:
            batch = self.cluster.apply(count, self.flow(self.cluster.put(self.loader.next(rows))))
            if self.keep is not None:
                names = {"keep": self.keep.func, "arguments": self.keep.keywords}
                batch = self.cluster.transform(filter_groups, batch, **names)
        return Round(version, aim, batch, calls)

    def _collect(self, done: Round) -> Stats:
        """Wait for a round; its groups go to the pool."""
        batch, stats = done.wait()
        if batch is not None and len(batch):
            self.pool.add(batch, done.version)
        return stats

    def _note_kept(self, stats: Stats) -> None:
        kept, dropped = (stats[name].value if name in stats else 0.0 for name in ("filter/kept", "filter/dropped"))
        if kept + dropped:
            self.kept = kept / (kept + dropped)

    # ---- one step --------------------------------------------------------------------------------------------------

    def _taken(self, version: int, stats: Stats) -> tuple[BatchRef, Stats]:
        """The batch to train on, and what it is like."""
        if not len(self.pool):
            raise RuntimeError(self._nothing(version, stats))
        with watch(self.cluster) as calls:
            batch: BatchRef | Future = self.pool.take(self.wanted)
            batch = self.replay.mix(batch) if self.replay else batch
            batch = self.cluster.apply(describe, batch, version=version)
        return batch.result(), calls.stats()

    def _nothing(self, version: int, stats: Stats) -> str:
        text = f"step {version + 1}: there is no group to train on"
        if self.keep is None:
            return f"{text}: every sample failed"
        dropped = int(stats["filter/dropped"].value) if "filter/dropped" in stats else 0
        return (
            f"{text}: `{self.keep.func.__name__}` dropped all {dropped} groups of {self.max_rounds} roll-outs "
            "(filter.max_rounds). Are all rewards of a prompt the same? Look at rewards in samples.jsonl, take more "
            "samples of a prompt (runtime.samples_per_prompt), or loosen the filter"
        )

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Cursor, and every batch that is not trained on yet. Waits for rounds under way: after a restart their weights
        are gone."""
        return {
            "loader": self.loader.state_dict(),
            "kept": self.kept,
            "buffer": [
                {"step": entry.step, "version": entry.version, "round": entry.batch.state_dict()}
                for entry in self.buffer.entries()
            ],
            "pool": [{"version": ready.version, "batch": ready.batch.fetch()} for ready in self.pool.entries()],
            "replay": self.replay.state_dict() if self.replay else [],
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue where ``state_dict`` was taken, after ``step`` steps."""
        self.loader.load_state_dict(state["loader"])
        self.kept = state["kept"]
        self.buffer.restore(
            step,
            [
                Entry(entry["step"], entry["version"], Round.restored(entry["round"], self.cluster))
                for entry in state["buffer"]
            ],
        )
        self.pool.restore([Ready(self.cluster.put(entry["batch"]), entry["version"]) for entry in state["pool"]])
        if self.replay:
            self.replay.load_state_dict(state["replay"])
