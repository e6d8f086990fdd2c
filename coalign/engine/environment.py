"""The roll-out side of an engine: draws prompts, runs ``env_flow``, and gives each step the groups it trains on.

A round is one run of the flow. Its groups pass the filter and wait in the pool; a step takes the oldest
``prompts_per_step`` of them, and where some are missing further rounds are run on the next prompts.

One run of a flow on some prompts: where its batch will be, the calls that make it, when it was begun.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from coalign.cluster.future import BatchRef, Future
from coalign.data.batch import Batch
from coalign.data.loader import Loader
from coalign.engine.buffer import Buffer, BufferedBatch, Pool, Ready
from coalign.engine.curriculum import pass_rates
from coalign.engine.filters import Control, filter_groups, response_lengths
from coalign.engine.ledger import Ledger
from coalign.engine.metrics import Calls, count, describe, group_ages, watch
from coalign.types import Metric, Stat, Stats, Total, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster

KINDS = {kind.__name__: kind for kind in get_args(Metric)}


@dataclass
class Round:
    """``batches`` by name: `groups` (those to train on), and small ones that say something of them: `ages`
    (describe.group_ages), `shares` (curriculum.pass_rates), `lengths` (lengths.response_lengths). None are in it where
    nothing had to be begun."""

    version: int  # of the weights it was begun with
    aim: int = 0  # groups hoped for
    batches: dict[str, Future | BatchRef] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    before: Stats = field(default_factory=dict)  # metrics of what came before its calls, or before a restart

    def wait(self) -> tuple[dict[str, BatchRef], Stats]:
        """(batches, merged metrics of its calls). Raises what a call raised."""
        done = {name: b.result() if isinstance(b, Future) else b for name, b in self.batches.items()}
        return done, merge_stats([self.before, self.calls.stats()])

    def state_dict(self) -> dict[str, Any]:
        """Waits for it: after a restart its weights are gone."""
        batches, stats = self.wait()
        coded = {name: [type(metric).__name__, *astuple(metric)] for name, metric in stats.items()}
        fetched = {name: batch.fetch() for name, batch in batches.items()}
        return {"version": self.version, "aim": self.aim, "stats": coded, "batches": fetched}

    @staticmethod
    def restore(state: dict[str, Any], cluster: Cluster) -> Round:
        """The round that ``state_dict`` described, finished."""
        before = {name: KINDS[kind](*numbers) for name, (kind, *numbers) in state["stats"].items()}
        batches: dict[str, Future | BatchRef] = {name: cluster.put(batch) for name, batch in state["batches"].items()}
        return Round(state["version"], state["aim"], batches, before=before)


LEAST_KEPT = 0.25  # a round is at most this many times larger than what is missing: memory and the age of a surplus


class Environment:
    """Runs a flow on prompts that a loader draws.

    ``flow(prompts: BatchRef) -> Future`` is the engine's ``env_flow``; it returns before anything is computed.
    ``ledger`` is what it generates by.
    """

    def __init__(
        self,
        cluster: Cluster,
        flow: Callable[[BatchRef], Future],
        loader: Loader,
        buffer: Buffer[Round],
        ledger: Ledger,
        control: Control,
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.loader = loader
        self.buffer = buffer
        self.ledger = ledger
        self.control = control
        self.pool = Pool(control.max_age)
        self.kept = 1.0  # the share of groups that the filter let through in the step before

    def next(self, version: int, served: int) -> tuple[BatchRef, Stats]:
        """The batch that the step at this weight version trains on, and its metrics (`time/rollout`: s waited).
        ``served``: the version that generates, an older one between two syncs (`sync.every`).

        RuntimeError if no group is left to train on.
        """
        begun = time.perf_counter()
        expired = self.pool.expire(version)
        self.buffer.fill(served, lambda step: self._begin(served, step, self._aim()))
        parts = [self._collect(self.buffer.take(version), version)]
        while self._missing and len(parts) < self.control.max_rounds * self.control.rounds_of_a_response:
            parts.append(self._collect(self._begin(served, version, self._missing), version))
        stats = merge_stats(parts)
        self._note_kept(stats)
        stats["rollout/rounds"] = Total(len(parts))
        batch, described = self._taken(version, stats)
        counts: Stats = {"time/rollout": Total(time.perf_counter() - begun)}
        if self.control.wanted is not None:
            counts |= {"rollout/expired": Total(expired), "rollout/waiting": Total(len(self.pool))}
        return batch, merge_stats([stats, described, self.loader.stats(), counts])

    # ---- one round -------------------------------------------------------------------------------------------------

    @property
    def _missing(self) -> int:
        """Groups that the step at hand lacks."""
        return max(0, (self.control.wanted or 0) - len(self.pool))

    def _aim(self) -> int:
        """Groups hoped for from the round of the step after all those begun."""
        under_way = [entry.batch.aim for entry in self.buffer.entries()]
        return max(0, (self.control.wanted or 0) * (len(under_way) + 1) - len(self.pool) - sum(under_way))

    def _begin(self, version: int, step: int, aim: int) -> Round:
        """Run the flow for ``step`` on as many prompts as promise ``aim`` groups."""
        rows = self._rows(aim)
        if rows == 0 and (self.ledger.min_complete == 0 or not self.ledger.carried):
            return Round(version)
        prompts, drawn = self._draw(rows, step)
        self.ledger.since = step - self.control.max_age
        batches: dict[str, Future | BatchRef] = {}
        with watch(self.cluster) as calls:
            groups = self.cluster.apply(count, self.flow(self.cluster.put(prompts)))
            if curriculum := self.control.curriculum:
                batches["shares"] = self.cluster.transform(pass_rates, groups, solved=curriculum.config.solved)
            if self.control.lengths:
                batches["lengths"] = self.cluster.transform(response_lengths, groups)
            if keep := self.control.keep:
                groups = self.cluster.transform(filter_groups, groups, keep=keep.func, arguments=keep.keywords)
            if self.ledger.carries:
                batches["ages"] = self.cluster.transform(group_ages, groups, default=version)
        self.ledger.check()
        return Round(version, aim, {"groups": groups, **batches}, calls, drawn)

    def _rows(self, aim: int) -> int | None:
        """Prompts to begin, by what the filter kept of late and by what is on its way; None: those of a batch."""
        if self.control.wanted is None:
            return None
        need = math.ceil(aim / max(self.kept, LEAST_KEPT))
        oversample = self.ledger.config.oversample
        if oversample == 1:
            return need
        carried = self.ledger.carried
        surplus = max(0, math.ceil((oversample - 1) * need - 1e-9) - carried)
        self.ledger.min_complete = need / max(1, need + surplus + carried)
        return need + surplus

    def _draw(self, rows: int | None, step: int) -> tuple[Batch, Stats]:
        """The next prompts, with what is known of each."""
        control, stats = self.control, {}
        if control.curriculum is None:
            prompts = self.loader.next(rows)
        else:
            prompts, stats = control.curriculum.draw(self.loader.batch_size if rows is None else rows, step)
        prompts = control.budget(prompts)
        return control.lengths.expect(prompts) if control.lengths else prompts, stats

    def _collect(self, done: Round, version: int) -> Stats:
        """Wait for a round; its groups go to the pool."""
        batches, stats = done.wait()
        if (curriculum := self.control.curriculum) and "shares" in batches:
            stats = merge_stats([stats, curriculum.note(batches["shares"].fetch(), version)])
        if (lengths := self.control.lengths) and "lengths" in batches:
            lengths.note(batches["lengths"].fetch())
        if "groups" in batches and len(batches["groups"]):
            ages = batches["ages"].fetch()["oldest"] if "ages" in batches else done.version
            self.pool.add(batches["groups"], ages)
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
            batch: BatchRef | Future = self.pool.take(self.control.wanted, version)
            batch = self.control.replay.mix(batch) if self.control.replay else batch
            batch = self.cluster.apply(describe, batch, version=version)
        taken = batch.result()
        if not len(taken):  # the pool was not empty
            raise RuntimeError(f"step {version + 1}: replay.fn returned no samples, so there is nothing to train on")
        described = calls.stats()
        staleness = described.get("samples/staleness")
        if isinstance(staleness, Stat) and not staleness.count:  # a policy was to write them
            raise RuntimeError(
                f"step {version + 1}: none of {len(taken)} samples has a token that the policy chose and that is "
                "trained on (loss_mask), so there is nothing to learn from"
            )
        return taken, described

    def _nothing(self, version: int, stats: Stats) -> str:
        text, control = f"step {version + 1}: there is no group to train on", self.control
        rounds = f"{stats['rollout/rounds'].value:g} roll-outs"
        if "episode/empty" in stats and stats["episode/empty"].value == 1:
            return f"{text}: the environment `{self.ledger.config.fn}` (rollout.fn) has asked the policy for no turn"
        if control.keep is None:
            return f"{text}: every sample failed, or none came to its end in {rounds}"
        dropped = int(stats["filter/dropped"].value) if "filter/dropped" in stats else 0
        limit = f"filter.max_rounds is {control.max_rounds}"
        if control.rounds_of_a_response > 1:
            limit += f", each of the {control.rounds_of_a_response} that the longest response takes"
        return (
            f"{text}: `{control.keep.func.__name__}` dropped all {dropped} groups of {rounds} ({limit}). Are all "
            "rewards of a prompt the same? Look at rewards in samples.jsonl, take more samples of a prompt "
            "(runtime.samples_per_prompt), or loosen the filter"
        )

    def restart(self, step: int) -> None:
        """Forget all samples, also those under way, and go on after ``step`` steps with the loader's next rows."""
        self.buffer.restore(step, [])
        self.pool.restore([])
        self.ledger.load_state_dict(None)
        if self.control.replay:
            self.control.replay.load_state_dict([])

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Cursor, and every batch that is not trained on yet. Waits for rounds under way: after a restart their weights
        are gone."""
        control = self.control
        return {
            "loader": self.loader.state_dict(),
            "kept": self.kept,
            "buffer": [
                {"step": entry.step, "version": entry.version, "round": entry.batch.state_dict()}
                for entry in self.buffer.entries()
            ],
            "pool": [{"version": ready.version, "batch": ready.batch.fetch()} for ready in self.pool.entries()],
            "unfinished": self.ledger.state_dict(),
            "replay": control.replay.state_dict() if control.replay else [],
            "curriculum": control.curriculum.state_dict() if control.curriculum else {},
            "lengths": control.lengths.state_dict() if control.lengths else {},
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue where ``state_dict`` was taken, after ``step`` steps."""
        self.loader.load_state_dict(state["loader"])
        self.kept = state["kept"]
        self.buffer.restore(
            step,
            [
                BufferedBatch(entry["step"], entry["version"], Round.restore(entry["round"], self.cluster))
                for entry in state["buffer"]
            ],
        )
        self.pool.restore([Ready(self.cluster.put(entry["batch"]), entry["version"]) for entry in state["pool"]])
        self.ledger.load_state_dict(state["unfinished"])
        if self.control.replay:
            self.control.replay.load_state_dict(state["replay"])
        if self.control.curriculum:
            self.control.curriculum.load_state_dict(state["curriculum"])
        if self.control.lengths:
            self.control.lengths.load_state_dict(state["lengths"])
