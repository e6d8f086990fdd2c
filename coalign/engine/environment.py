"""The roll-out side of an engine: draws prompts, runs ``env_flow``, and gives each step the groups it trains on.

A round is one run of the flow. Its groups pass the filter and wait in the pool; a step takes the oldest
``prompts_per_step`` of them. While some are missing, further rounds are run on the next prompts. ``Buffer`` holds the
rounds under way, ``GroupPool`` complete groups, both the oldest first.

A batch that is consumed at step s was begun at weight version v >= s - max_staleness: a batch is only begun while
``begun - version <= max_staleness``, and step s consumes the s-th batch begun. So the bound holds by construction and
is asserted where it matters, at consumption. With max_staleness 0 a batch is begun only after the weights of the step
before are in place: synchronous training.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import torch
from torch import Tensor

from coalign.cluster.future import BatchRef, Future
from coalign.data.batch import Batch
from coalign.data.loader import Loader
from coalign.engine.curriculum import pass_rates
from coalign.engine.filters import GroupSelection, filter_groups, response_lengths
from coalign.engine.ledger import Ledger
from coalign.engine.metrics import WatchedCalls, count, describe, describe_sources, group_ages, watch
from coalign.types import Metric, Stat, Stats, Total, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BufferedBatch(Generic[T]):
    step: int  # the training step that will consume it
    version: int  # the weight version it was begun with
    batch: T


class Buffer(Generic[T]):
    """A first-in first-out queue up to step ``last`` of a run."""

    def __init__(self, max_staleness: int, last: int) -> None:
        self.max_staleness = max_staleness
        self.last = last
        self.begun = 0
        self._entries: deque[BufferedBatch[T]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, version: int, begin: Callable[[int], T]) -> None:
        """Begin as many batches as the bound allows at this version; ``begin(step)`` begins the one for that step."""
        while self.begun < self.last and self.begun - version <= self.max_staleness:
            self._entries.append(BufferedBatch(self.begun, version, begin(self.begun)))
            self.begun += 1

    def take(self, version: int) -> T:
        """Remove and return the oldest batch. AssertionError if it is staler than the bound: a bug in the loop."""
        entry = self._entries.popleft()
        assert version - entry.version <= self.max_staleness and entry.step == version, entry
        return entry.batch

    def entries(self) -> list[BufferedBatch[T]]:
        """Return all entries, oldest first (for a checkpoint)."""
        return list(self._entries)

    def restore(self, step: int, entries: list[BufferedBatch[T]]) -> None:
        """Continue at ``step`` with the result of ``entries``."""
        self._entries = deque(entries)
        self.begun = step + len(entries)


@dataclass(frozen=True, slots=True)
class ReadyGroups:
    """Neighbouring groups whose oldest token was chosen by the weights of ``version``."""

    batch: BatchRef
    version: int

    @property
    def ends(self) -> list[int]:
        """Where each group ends, in rows; without groups every row is one."""
        return find_group_ends(self.batch.group, len(self.batch))


class GroupPool:
    """A first-in first-out queue of groups no older than ``max_age`` weight versions.

    Batches stay where they are stored.
    """

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._ready: deque[ReadyGroups] = deque()

    def __len__(self) -> int:
        """Groups inside."""
        return sum(len(ready.ends) for ready in self._ready)

    def add(self, batch: BatchRef, versions: Tensor | int) -> None:
        """Add groups; ``versions`` i64[groups], or one for all, are those of their oldest tokens."""
        ends = find_group_ends(batch.group, len(batch))
        ages = torch.as_tensor(versions).expand(len(ends)).tolist()
        start = 0
        for i, end in enumerate(ends):
            if i + 1 == len(ends) or ages[i + 1] != ages[i]:
                self._ready.append(ReadyGroups(batch.slice(start, end), ages[i]))
                start = end

    def expire(self, version: int) -> int:
        """Drop the groups that are too old to be trained on at this version; return how many."""
        before = len(self)
        self._ready = deque(ready for ready in self._ready if version - ready.version <= self.max_age)
        return before - len(self)

    def take(self, groups: int | None, version: int) -> BatchRef:
        """Remove and return the oldest ``groups`` (None: all), or fewer if there are not so many.

        RuntimeError if the pool is empty. AssertionError if a group is older than the bound, which is a bug.
        """
        taken: list[BatchRef] = []
        missing = len(self) if groups is None else groups
        while self._ready and missing > 0:
            ready = self._ready.popleft()
            assert version - ready.version <= self.max_age, (version, ready)
            ends = ready.ends
            cut = ends[min(missing, len(ends)) - 1]
            taken.append(ready.batch.slice(0, cut))
            missing -= len(ends)
            if cut < len(ready.batch):
                self._ready.appendleft(ReadyGroups(ready.batch.slice(cut, len(ready.batch)), ready.version))
        if not taken:
            raise RuntimeError("there is no group to train on")
        return BatchRef.concat(taken)

    def entries(self) -> list[ReadyGroups]:
        """Return all entries, oldest first (for a checkpoint)."""
        return list(self._ready)

    def restore(self, entries: list[ReadyGroups]) -> None:
        """Replace the content by the result of ``entries``."""
        self._ready = deque(entries)


def find_group_ends(group: Tensor | None, rows: int) -> list[int]:
    """Return where each run of equal neighbours in ``group`` i64[N] ends; without groups every row is one."""
    if group is None:
        return list(range(1, rows + 1))
    return torch.unique_consecutive(group, return_counts=True)[1].cumsum(0).tolist()


KINDS = {kind.__name__: kind for kind in get_args(Metric)}


@dataclass
class Round:
    """One run of the flow on some prompts.

    ``batches`` by name: `groups` (those to train on), and small ones that describe them: `ages` (metrics.group_ages),
    `shares` (curriculum.pass_rates), `lengths` (filters.response_lengths). It is empty if there was nothing to do.
    """

    version: int  # of the weights that it began with
    target: int = 0  # number of groups that it should give
    batches: dict[str, Future | BatchRef] = field(default_factory=dict)
    calls: WatchedCalls = field(default_factory=WatchedCalls)
    before: Stats = field(default_factory=dict)  # metrics of what came before its calls, or before a restart
    position: dict[str, Any] = field(default_factory=dict)  # of the loader when it began

    def wait(self) -> tuple[dict[str, BatchRef], Stats]:
        """Wait for all calls; return (batches, merged metrics). Raises what a call raised."""
        done = {name: b.result() if isinstance(b, Future) else b for name, b in self.batches.items()}
        return done, merge_stats([self.before, self.calls.stats()])

    def is_complete(self) -> bool:
        """Whether every call of the round has ended without an error."""
        calls = [batch for batch in self.batches.values() if isinstance(batch, Future)]
        return all(call.done() and call.ended.exception() is None for call in calls)

    def state_dict(self) -> dict[str, Any]:
        """Wait for the round, as its weights are gone after a restart, and return what a checkpoint keeps of it."""
        batches, stats = self.wait()
        coded = {name: [type(metric).__name__, *astuple(metric)] for name, metric in stats.items()}
        fetched = {name: batch.fetch() for name, batch in batches.items()}
        return {"version": self.version, "aim": self.target, "stats": coded, "batches": fetched}

    @staticmethod
    def restore(state: dict[str, Any], cluster: Cluster) -> Round:
        """Restore the finished round that ``state_dict`` described."""
        before = {name: KINDS[kind](*numbers) for name, (kind, *numbers) in state["stats"].items()}
        batches: dict[str, Future | BatchRef] = {name: cluster.put(batch) for name, batch in state["batches"].items()}
        return Round(state["version"], state["aim"], batches, before=before)


MIN_KEPT_SHARE = 0.25  # a round begins at most 1 / this many prompts per missing group: a surplus costs memory and ages


class Environment:
    """Runs a flow on prompts that a loader draws.

    ``flow(prompts: BatchRef) -> Future`` is the engine's ``env_flow``; it returns before anything is computed.
    ``ledger`` keeps the samples that it leaves unfinished.
    """

    def __init__(
        self,
        cluster: Cluster,
        flow: Callable[[BatchRef], Future],
        loader: Loader,
        buffer: Buffer[Round],
        ledger: Ledger,
        selection: GroupSelection,
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.loader = loader
        self.buffer = buffer
        self.ledger = ledger
        self.selection = selection
        self.pool = GroupPool(selection.max_age)
        self.kept_share = 1.0  # of the groups of the step before: what the filter let through

    def next(self, version: int, served: int) -> tuple[BatchRef, Stats]:
        """Return the batch that the step at this weight version trains on, and its metrics (`time/rollout`: s waited).

        ``served`` is the version that generates, an older one between two syncs (`sync.every`). RuntimeError if no
        group is left to train on.
        """
        begun = time.perf_counter()
        expired = self.pool.expire(version)
        self.buffer.fill(served, lambda step: self._begin(served, step, self._next_target))
        parts = [self._collect(self.buffer.take(version), version)]
        while self._missing and len(parts) < self.selection.max_rounds * self.selection.rounds_per_response:
            parts.append(self._collect(self._begin(served, version, self._missing), version))
        stats = merge_stats(parts)
        self._update_kept_share(stats)
        stats["rollout/rounds"] = Total(len(parts))
        batch, described = self._take_batch(version, stats)
        counts: Stats = {"time/rollout": Total(time.perf_counter() - begun)}
        if self.selection.groups is not None:
            counts |= {"rollout/expired": Total(expired), "rollout/waiting": Total(len(self.pool))}
        return batch, merge_stats([stats, described, self.loader.stats(), counts])

    # ---- one round -------------------------------------------------------------------------------------------------

    @property
    def _missing(self) -> int:
        """Groups that the step at hand lacks."""
        return max(0, (self.selection.groups or 0) - len(self.pool))

    @property
    def _next_target(self) -> int:
        """Number of groups that the round for the step after all those begun should give."""
        under_way = [entry.batch.target for entry in self.buffer.entries()]
        return max(0, (self.selection.groups or 0) * (len(under_way) + 1) - len(self.pool) - sum(under_way))

    def _begin(self, version: int, step: int, target: int) -> Round:
        """Run the flow for ``step`` on as many prompts as should give ``target`` groups."""
        rows = self._count_prompts(target)
        if rows == 0 and (self.ledger.min_complete == 0 or not self.ledger.carried):
            return Round(version)
        position = self.loader.state_dict()
        prompts, drawn = self._draw(rows, step)
        self.ledger.since = step - self.selection.max_age
        several = len(self.loader.sources) > 1
        batches: dict[str, Future | BatchRef] = {}
        with watch(self.cluster) as calls:
            groups = self.cluster.apply(count, self.flow(self.cluster.put(prompts)))
            if curriculum := self.selection.curriculum:
                batches["shares"] = self.cluster.transform(pass_rates, groups, solved=curriculum.config.solved)
            if self.selection.lengths:
                batches["lengths"] = self.cluster.transform(response_lengths, groups)
            if keep := self.selection.filter:
                groups = self.cluster.transform(
                    filter_groups, groups, keep=keep.func, arguments=keep.keywords, by_source=several
                )
            if self.ledger.carries:
                batches["ages"] = self.cluster.transform(group_ages, groups, default=version)
        self.ledger.check()
        return Round(version, target, {"groups": groups, **batches}, calls, drawn, position)

    def _count_prompts(self, target: int) -> int | None:
        """Return how many prompts to begin for ``target`` groups; None: those of a batch.

        Counts with the share that the filter kept last, and with the groups carried over.
        """
        if self.selection.groups is None:
            return None
        need = math.ceil(target / max(self.kept_share, MIN_KEPT_SHARE))
        oversample = self.ledger.config.oversample
        if oversample == 1:
            return need
        carried = self.ledger.carried
        surplus = max(0, math.ceil((oversample - 1) * need - 1e-9) - carried)
        self.ledger.min_complete = need / max(1, need + surplus + carried)
        return need + surplus

    def _draw(self, rows: int | None, step: int) -> tuple[Batch, Stats]:
        """Draw the next prompts and add their budgets and expected lengths."""
        selection, stats = self.selection, {}
        if selection.curriculum is None:
            prompts = self.loader.next(rows)
        else:
            prompts, stats = selection.curriculum.draw(self.loader.batch_size if rows is None else rows, step)
        if selection.add_budgets:
            prompts = selection.add_budgets(prompts)
        return selection.lengths.expect(prompts) if selection.lengths else prompts, stats

    def _collect(self, done: Round, version: int) -> Stats:
        """Wait for a round and add its groups to the pool."""
        batches, stats = done.wait()
        if (curriculum := self.selection.curriculum) and "shares" in batches:
            stats = merge_stats([stats, curriculum.note(batches["shares"].fetch(), version)])
        if (lengths := self.selection.lengths) and "lengths" in batches:
            lengths.note(batches["lengths"].fetch())
        if "groups" in batches and len(batches["groups"]):
            ages = batches["ages"].fetch()["oldest"] if "ages" in batches else done.version
            self.pool.add(batches["groups"], ages)
        return stats

    def _update_kept_share(self, stats: Stats) -> None:
        kept, dropped = (stats[name].value if name in stats else 0.0 for name in ("filter/kept", "filter/dropped"))
        if kept + dropped:
            self.kept_share = kept / (kept + dropped)

    # ---- one step --------------------------------------------------------------------------------------------------

    def _take_batch(self, version: int, stats: Stats) -> tuple[BatchRef, Stats]:
        """Take the batch to train on from the pool; return it and its metrics."""
        if not len(self.pool):
            raise RuntimeError(self._explain_empty_pool(version, stats))
        with watch(self.cluster) as calls:
            batch: BatchRef | Future = self.pool.take(self.selection.groups, version)
            batch = self.selection.replay.mix(batch) if self.selection.replay else batch
            batch = self.cluster.apply(describe, batch, version=version)
            if len(self.loader.sources) > 1:
                batch = self.cluster.apply(describe_sources, batch)
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

    def _explain_empty_pool(self, version: int, stats: Stats) -> str:
        text, selection = f"step {version + 1}: there is no group to train on", self.selection
        rounds = f"{stats['rollout/rounds'].value:g} roll-outs"
        if "episode/empty" in stats and stats["episode/empty"].value == 1:
            return f"{text}: the environment `{self.ledger.config.fn}` (rollout.fn) has asked the policy for no turn"
        if selection.filter is None:
            return f"{text}: every sample failed, or none came to its end in {rounds}"
        dropped = int(stats["filter/dropped"].value) if "filter/dropped" in stats else 0
        limit = f"filter.max_rounds is {selection.max_rounds}"
        if selection.rounds_per_response > 1:
            limit += f", each of the {selection.rounds_per_response} that the longest response takes"
        return (
            f"{text}: `{selection.filter.func.__name__}` dropped all {dropped} groups of {rounds} ({limit}). Are all "
            "rewards of a prompt the same? Look at rewards in samples.jsonl, take more samples of a prompt "
            "(runtime.samples_per_prompt), or loosen the filter"
        )

    def restart(self, step: int) -> None:
        """Forget all samples, also those under way, and go on after ``step`` steps with the loader's next rows."""
        self.buffer.restore(step, [])
        self.pool.restore([])
        self.ledger.restore(None)
        if self.selection.replay:
            self.selection.replay.restore([])

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the loader's position and references to every batch that is not trained on yet, without waiting."""
        selection = self.selection
        return {
            "loader": self.loader.state_dict(),
            "kept": self.kept_share,
            "buffer": self.buffer.entries(),
            "pool": self.pool.entries(),
            "unfinished": self.ledger.snapshot(),
            "replay": list(selection.replay.remembered) if selection.replay else [],
            "curriculum": selection.curriculum.state_dict() if selection.curriculum else {},
            "lengths": selection.lengths.state_dict() if selection.lengths else {},
        }

    def fetch_state(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint keeps of a ``snapshot``: the batches themselves.

        Waits for rounds under way, because their weights are gone after a restart.
        """
        unfinished = snapshot["unfinished"]
        return snapshot | {
            "buffer": [
                {"step": entry.step, "version": entry.version, "round": entry.batch.state_dict()}
                for entry in snapshot["buffer"]
            ],
            "pool": [{"version": ready.version, "batch": ready.batch.fetch()} for ready in snapshot["pool"]],
            "unfinished": None if unfinished is None else self.cluster.resolve(unfinished).fetch(),
            "replay": [batch.fetch() for batch in snapshot["replay"]],
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue with the result of ``fetch_state``, after ``step`` steps."""
        self.loader.load_state_dict(state["loader"])
        self.kept_share = state["kept"]
        self.buffer.restore(
            step,
            [
                BufferedBatch(entry["step"], entry["version"], Round.restore(entry["round"], self.cluster))
                for entry in state["buffer"]
            ],
        )
        self.pool.restore([ReadyGroups(self.cluster.put(entry["batch"]), entry["version"]) for entry in state["pool"]])
        self.ledger.restore(state["unfinished"])
        if self.selection.replay:
            self.selection.replay.restore(state["replay"])
        if self.selection.curriculum:
            self.selection.curriculum.load_state_dict(state["curriculum"])
        if self.selection.lengths:
            self.selection.lengths.load_state_dict(state["lengths"])


def drop_failed_rounds(snapshot: dict[str, Any]) -> int:
    """Remove the rounds of a ``snapshot`` that have no result, and those after them; return how many.

    The loader's position becomes that of the first one, so its prompts are drawn again.
    """
    entries: list[BufferedBatch[Round]] = snapshot["buffer"]
    good = next((i for i, entry in enumerate(entries) if not entry.batch.is_complete()), len(entries))
    if good < len(entries):
        snapshot["loader"] = entries[good].batch.position or snapshot["loader"]
        snapshot["buffer"] = entries[:good]
        snapshot["unfinished"] = None  # of a roll-out under way
    return len(entries) - good
