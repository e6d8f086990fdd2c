"""The rollout side of an engine: draws prompts, runs ``env_flow``, and gives each step the groups it trains on.

Prompts are drawn for a step. They go through the flow in bundles: in one where training is synchronous, in several
where it is not, so that no group waits for the longest response of all. Complete groups that pass the filter wait in
the pool. A step takes the oldest ``prompts_per_step`` of them, in the order drawn. While some are missing, it takes
those drawn for later steps, and then draws more.

**The bound.** A step at weight version s trains on tokens of version v >= s - max_staleness: prompts are drawn for a
step only while ``step - version <= max_staleness``. Groups that have become older are dropped before a step takes any,
and their age is asserted where they are taken. With max_staleness 0 prompts are drawn after the weights of the step
before are in place: synchronous training. With more, replicas of the policy generate all the time, and take new weights
between two slices of their work (coalign.cluster.slices).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from coalign.cluster.future import BatchRef, Future, WatchedCalls
from coalign.data.batch import Batch
from coalign.data.loader import Loader
from coalign.engine.journal import CollectedBundle, Journal, describe_samples, format_groups, list_groups
from coalign.engine.selection import GroupSelection, filter_groups, find_sources, pass_rates, response_lengths
from coalign.engine.unfinished import UnfinishedGroups, find_oldest_versions
from coalign.types import Max, Metric, Moments, Stat, Stats, Status, Total, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster


@dataclass(frozen=True, slots=True)
class _ReadyGroups:
    """Neighbouring groups whose oldest token was sampled by the weights of ``version``."""

    batch: BatchRef
    version: int

    @property
    def ends(self) -> list[int]:
        """The row at which each group ends; without groups every row is one."""
        return _find_group_ends(self.batch.group, len(self.batch))


class GroupPool:
    """A first-in first-out queue of references to groups no older than ``max_age`` weight versions."""

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._ready: deque[_ReadyGroups] = deque()

    def __len__(self) -> int:
        """Count the groups."""
        return sum(len(ready.ends) for ready in self._ready)

    def add(self, batch: BatchRef, versions: Tensor | int) -> None:
        """Add groups; ``versions`` i64[groups], or one for all, are those of their oldest tokens."""
        ends = _find_group_ends(batch.group, len(batch))
        ages = torch.as_tensor(versions).expand(len(ends)).tolist()
        start = 0
        for i, end in enumerate(ends):
            if i + 1 == len(ends) or ages[i + 1] != ages[i]:
                self._ready.append(_ReadyGroups(batch.slice(start, end), ages[i]))
                start = end

    def find_expired(self, version: int) -> list[int]:
        """Return the numbers of the groups that are too old to be trained on at this version."""
        old = (ready for ready in self._ready if version - ready.version > self.max_age)
        return [group for ready in old for group in list_groups(ready.batch.group)]

    def expire(self, version: int) -> int:
        """Drop the groups that are too old to be trained on at this version; return how many."""
        held = len(self)
        self._ready = deque(ready for ready in self._ready if version - ready.version <= self.max_age)
        return held - len(self)

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
                self._ready.appendleft(_ReadyGroups(ready.batch.slice(cut, len(ready.batch)), ready.version))
        if not taken:
            raise RuntimeError("there is no group to train on")
        return BatchRef.concat(taken)

    def entries(self) -> list[_ReadyGroups]:
        """Return all entries, oldest first (for a checkpoint)."""
        return list(self._ready)

    def restore(self, entries: list[_ReadyGroups]) -> None:
        """Replace the content by the result of ``entries``."""
        self._ready = deque(entries)


def _find_group_ends(group: Tensor | None, rows: int) -> list[int]:
    """Return where each run of equal neighbours in ``group`` i64[N] ends; without groups every row is one."""
    if group is None:
        return list(range(1, rows + 1))
    return torch.unique_consecutive(group, return_counts=True)[1].cumsum(0).tolist()


METRIC_TYPES = {metric.__name__: metric for metric in get_args(Metric)}


@dataclass
class Bundle:
    """Groups that go through the flow together.

    ``batches`` by name: `groups` (those to train on), and small ones that describe them: `ages` (_group_ages),
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
        if not self.is_complete():
            return {"target": self.target, "prompts": self.prompts, "before": _encode(self.earlier_stats)}
        batches, stats = self.wait()
        fetched = {name: batch.fetch() for name, batch in batches.items()}
        return {"target": self.target, "version": self.version, "batches": fetched, "before": _encode(stats)}


def _encode(stats: Stats) -> dict[str, list[Any]]:
    return {name: [type(metric).__name__, *astuple(metric)] for name, metric in stats.items()}


MIN_KEPT_SHARE = 0.25  # so at most 4 prompts are drawn per missing group: a surplus costs memory, and ages
MAX_BUNDLES_PER_STEP = 8  # where training does not wait for the rollout; else 1


class Environment:
    """Runs a flow on prompts that a loader draws, for the first ``last`` steps.

    ``flow(prompts: BatchRef) -> Future`` is the engine's ``env_flow``; it returns before anything is computed.
    ``unfinished`` keeps the samples that the flow leaves unfinished. ``on_wait()`` is called every second while
    ``next`` waits for samples.
    """

    def __init__(
        self,
        cluster: Cluster,
        flow: Callable[[BatchRef], Future],
        loader: Loader,
        unfinished: UnfinishedGroups,
        selection: GroupSelection,
        *,
        max_staleness: int,
        last: int,
        on_wait: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self.flow = flow
        self.loader = loader
        self.unfinished = unfinished
        self.selection = selection
        self.max_staleness = max_staleness
        self.last = last
        self.drawn = 0  # steps that prompts have been drawn for
        self.under_way: deque[tuple[int, Bundle]] = deque()  # (the step that its prompts were drawn for, bundle)
        self.pool = GroupPool(selection.max_age)
        self.on_wait = on_wait
        self.kept_share = 1.0  # share of the last step's groups that passed the filter
        self.journal: Journal | None = None  # set by coalign.engine.hooks.journal_hook

    def next(self, version: int, served: int) -> tuple[BatchRef, Stats]:
        """Return the batch that the step at this weight version trains on, and its metrics (`time/rollout`: s waited).

        ``served`` is the version that generates, older than ``version`` between two syncs (`sync.every`). RuntimeError
        if no group is left to train on.
        """
        started_at = time.perf_counter()
        if self.journal:
            self.journal.note_dropped("expired", self.pool.find_expired(version))
        expired = self.pool.expire(version)
        self.under_way = deque((step, self._begin_restored(served, step, bundle)) for step, bundle in self.under_way)
        while self.drawn < self.last and self.drawn - served <= self.max_staleness:
            self._draw_step(served, self.drawn, self._count_wanted(version))
            self.drawn += 1
        bundle_stats, rounds = [], 1
        while self.under_way and (self.under_way[0][0] <= version or self._missing):
            bundle_stats.append(self._collect(self.under_way.popleft()[1], version))
        while self._missing and rounds < self.selection.max_rounds * self.selection.rounds_per_response:
            self._draw_step(served, version, self._missing)
            bundle_stats += [self._collect(bundle, version) for _, bundle in self.under_way]
            self.under_way.clear()
            rounds += 1
        stats = merge_stats(bundle_stats)
        self._update_kept_share(stats)
        stats["rollout/rounds"] = Total(rounds)
        batch, described = self._take_batch(version, stats)
        counts: Stats = {"time/rollout": Total(time.perf_counter() - started_at)}
        if self.unfinished.finished is not None and (restored := self.unfinished.finished.take_restored()):
            counts["rollout/restored"] = Total(restored)
        if self.selection.groups is not None:
            counts |= {"rollout/expired": Total(expired), "rollout/waiting": Total(len(self.pool))}
        return batch, merge_stats([stats, described, self.loader.stats(), counts])

    # ---- bundles ---------------------------------------------------------------------------------------------------

    @property
    def _missing(self) -> int:
        """How many groups the current step still lacks."""
        return max(0, (self.selection.groups or 0) - len(self.pool))

    def _count_wanted(self, version: int) -> int:
        """Return how many groups to draw for the next step, beside those in the pool or under way."""
        steps = self.drawn + 1 - version
        expected = sum(bundle.target for _, bundle in self.under_way)
        return max(0, (self.selection.groups or 0) * steps - len(self.pool) - expected)

    def _draw_step(self, version: int, step: int, target: int) -> None:
        """Draw as many prompts for ``step`` as should give ``target`` groups, and run the flow on them."""
        rows = self._count_prompts(target)
        if rows == 0 and (self.unfinished.min_complete == 0 or not self.unfinished.continued_groups):
            self.under_way.append((step, Bundle(version)))
            return
        prompts, stats = self._draw(rows, step)
        self.unfinished.oldest_version = step - self.selection.max_age
        bundles = min(MAX_BUNDLES_PER_STEP, max(1, len(prompts))) if self.max_staleness else 1
        chunks = prompts.split(bundles, keep="group", by="sequences") if bundles > 1 else [prompts]
        if self.journal:
            self.journal.note_drawn(step + 1, version, chunks)
        for number, chunk in enumerate(chunks):
            chunk_target = target * (number + 1) // bundles - target * number // bundles
            self.under_way.append((step, self._begin(version, step, chunk_target, chunk, stats if number == 0 else {})))

    def _begin(self, version: int, step: int, target: int, prompts: Batch, stats: Stats) -> Bundle:
        """Run the flow on prompts for a ``step``; ``stats`` are metrics of drawing them."""
        several = len(self.loader.sources) > 1
        batches: dict[str, Future | BatchRef] = {}
        may_be_older = self.max_staleness > 0 and self.unfinished.finished is not None
        if self.unfinished.finished is not None:
            self.unfinished.finished.window = (step - self.max_staleness if may_be_older else version, version)
        in_turn = nullcontext() if self.max_staleness == 0 else self.cluster.any_order()
        with in_turn, self.cluster.watch() as calls:
            with self.unfinished.roll_out():
                samples = self.flow(self.cluster.put(prompts))
            groups = complete = self.cluster.apply(count, samples)
            if curriculum := self.selection.curriculum:
                batches["shares"] = self.cluster.transform(pass_rates, groups, solved=curriculum.config.solved)
            if self.selection.lengths:
                batches["lengths"] = self.cluster.transform(response_lengths, groups)
            if keep := self.selection.filter:
                groups = self.cluster.transform(
                    filter_groups, groups, keep=keep.func, arguments=keep.keywords, by_source=several
                )
            if self.unfinished.continues or may_be_older:
                batches["ages"] = self.cluster.transform(_group_ages, groups, default=version)
        if self.journal:  # outside of `watch`, which would add it to the metrics of the step
            batches["samples"] = self.cluster.transform(describe_samples, complete)
        return Bundle(version, target, prompts, {"groups": groups, **batches}, calls, stats)

    def _count_prompts(self, target: int) -> int | None:
        """Return how many prompts to draw for ``target`` groups; None: those of a batch.

        Expects the filter to keep the share that it kept last, and subtracts groups that are continued.
        """
        if self.selection.groups is None:
            return None
        need = math.ceil(target / max(self.kept_share, MIN_KEPT_SHARE))
        oversample = self.unfinished.config.oversample
        if oversample == 1:
            return need
        continued = self.unfinished.continued_groups
        surplus = max(0, math.ceil((oversample - 1) * need - 1e-9) - continued)
        self.unfinished.min_complete = need / max(1, need + surplus + continued)
        return need + surplus

    def _draw(self, rows: int | None, step: int) -> tuple[Batch, Stats]:
        """Draw the next prompts, with their budgets and expected lengths; also metrics of drawing."""
        selection, stats = self.selection, {}
        if selection.curriculum is None:
            prompts = self.loader.next(rows)
        else:
            prompts, stats = selection.curriculum.draw(self.loader.batch_size if rows is None else rows, step)
        if selection.add_budgets:
            prompts = selection.add_budgets(prompts)
        return selection.lengths.expect(prompts) if selection.lengths else prompts, stats

    def _collect(self, done: Bundle, version: int) -> Stats:
        """Wait for a bundle and add its groups to the pool."""
        described = done.batches.pop("samples", None)  # only the journal needs it, so no step waits for it
        for batch in done.batches.values():
            if isinstance(batch, Future):
                batch.wait(self.on_wait)
        batches, stats = done.wait()
        if (curriculum := self.selection.curriculum) and "shares" in batches:
            stats = merge_stats([stats, curriculum.note(batches["shares"].fetch(), version)])
        if (lengths := self.selection.lengths) and "lengths" in batches:
            lengths.note(batches["lengths"].fetch())
        if "groups" in batches and len(batches["groups"]):
            ages = batches["ages"].fetch()["oldest"] if "ages" in batches else done.version
            self.pool.add(batches["groups"], ages)
        if self.journal and described is not None:
            prompted = list_groups(done.prompts["group"]) if done.prompts else []
            kept, continued = list_groups(batches["groups"].group), self.unfinished.list_continued()
            self.journal.note_collected(CollectedBundle(described, prompted, kept, continued, stats))
        return stats

    def _update_kept_share(self, stats: Stats) -> None:
        kept, dropped = (stats[name].value if name in stats else 0.0 for name in ("filter/kept", "filter/dropped"))
        if kept + dropped:
            self.kept_share = kept / (kept + dropped)

    def _begin_restored(self, version: int, step: int, bundle: Bundle) -> Bundle:
        """Run the flow on a bundle whose samples were not complete at the checkpoint; return any other unchanged."""
        if bundle.batches or bundle.prompts is None:
            return bundle
        if self.journal:
            self.journal.note_begun(bundle.prompts, version)
        return self._begin(version, step, bundle.target, bundle.prompts, bundle.earlier_stats)

    # ---- one step --------------------------------------------------------------------------------------------------

    def _take_batch(self, version: int, stats: Stats) -> tuple[BatchRef, Stats]:
        """Take the batch to train on from the pool; return it and its metrics."""
        if not len(self.pool):
            raise RuntimeError(self._explain_empty_pool(version, stats))
        with self.cluster.watch() as calls:
            waited = self.pool.take(self.selection.groups, version)
            batch: BatchRef | Future = self.selection.replay.mix(waited) if self.selection.replay else waited
            batch = self.cluster.apply(describe, batch, version=version)
            if len(self.loader.sources) > 1:
                batch = self.cluster.apply(describe_sources, batch)
        taken = batch.result()
        if not len(taken):  # the pool was not empty
            raise RuntimeError(f"step {version + 1}: replay.fn returned no samples, so there is nothing to train on")
        described = calls.stats()
        staleness = described.get("samples/staleness")
        if isinstance(staleness, Stat) and not staleness.count:  # there is a policy, and it sampled none of them
            raise RuntimeError(
                f"step {version + 1}: none of {len(taken)} samples has a token that the policy chose and that is "
                "trained on (loss_mask), so there is nothing to learn from"
            )
        if self.journal:
            self.journal.note_taken(version + 1, waited.group, taken.group)
        return taken, described

    def _explain_empty_pool(self, version: int, stats: Stats) -> str:
        text, selection = f"step {version + 1}: there is no group to train on", self.selection
        rounds = f"{stats['rollout/rounds'].value:g} rollouts"
        if "episode/empty" in stats and stats["episode/empty"].value == 1:
            name = self.unfinished.config.fn
            return f"{text}: the environment `{name}` (rollout.fn) has asked the policy for no turn"
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
        """Discard all samples, also those under way, and go on after ``step`` steps with the loader's next rows."""
        self.under_way.clear()
        self.drawn = step
        self.pool.restore([])
        self.unfinished.restore(None)
        if self.selection.replay:
            self.selection.replay.restore([])

    def note_resumed(self, step: int) -> None:
        """Note in the journal, if there is one, that the run goes on from the state saved after ``step``."""
        if self.journal:
            waiting = format_groups(self.list_waiting_groups())
            self.journal.note("resumed", step=step, drawn=self.loader.drawn, waiting=waiting)

    def list_waiting_groups(self) -> list[int]:
        """Return the numbers of the groups that no step has taken yet, unfinished ones included."""
        waiting = set(self.unfinished.list_continued() or ())
        for batch in (ready.batch for ready in self.pool.entries()):
            waiting.update(list_groups(batch.group))
        for _, bundle in self.under_way:
            waiting.update(bundle.list_groups())
        return sorted(waiting)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the loader's position and references to every batch that is not trained on yet, without waiting."""
        selection = self.selection
        return {
            "loader": self.loader.state_dict(),
            "kept": self.kept_share,
            "drawn": self.drawn,
            "under_way": list(self.under_way),
            "pool": self.pool.entries(),
            "unfinished": self.unfinished.snapshot(),
            "replay": list(selection.replay.remembered) if selection.replay else [],
            "curriculum": selection.curriculum.state_dict() if selection.curriculum else {},
            "lengths": selection.lengths.state_dict() if selection.lengths else {},
        }

    def fetch_state(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return a ``snapshot`` as a checkpoint keeps it: with the batches, and the prompts that are under way."""
        unfinished = snapshot["unfinished"]
        return snapshot | {
            "under_way": [{"step": step, **bundle.state_dict()} for step, bundle in snapshot["under_way"]],
            "pool": [{"version": ready.version, "batch": ready.batch.fetch()} for ready in snapshot["pool"]],
            "unfinished": None if unfinished is None else self.cluster.resolve(unfinished).fetch(),
            "replay": [batch.fetch() for batch in snapshot["replay"]],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the result of ``fetch_state``. Prompts that were under way are generated again."""
        self.loader.load_state_dict(state["loader"])
        self.kept_share, self.drawn = state["kept"], state["drawn"]
        self.under_way = deque((entry["step"], self._restore(entry)) for entry in state["under_way"])
        self.pool.restore([_ReadyGroups(self.cluster.put(entry["batch"]), entry["version"]) for entry in state["pool"]])
        self.unfinished.restore(state["unfinished"])
        if self.selection.replay:
            self.selection.replay.restore(state["replay"])
        if self.selection.curriculum:
            self.selection.curriculum.load_state_dict(state["curriculum"])
        if self.selection.lengths:
            self.selection.lengths.load_state_dict(state["lengths"])

    def _restore(self, state: dict[str, Any]) -> Bundle:
        stats = {name: METRIC_TYPES[metric](*numbers) for name, (metric, *numbers) in state["before"].items()}
        batches: dict[str, Future | BatchRef] = {
            name: self.cluster.put(stored) for name, stored in state.get("batches", {}).items()
        }
        return Bundle(state.get("version", 0), state["target"], state.get("prompts"), batches, earlier_stats=stats)


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


def describe_sources(rows: list[dict[str, Any]], group: Tensor, reward: Tensor | None = None) -> dict[str, Metric]:
    """Metrics of each source of a batch that is trained on: samples, groups and mean reward."""
    stats: dict[str, Metric] = {}
    for source, is_of_source in find_sources(rows).items():
        stats[f"source/{source}/samples"] = Total(float(is_of_source.sum()))
        stats[f"source/{source}/groups"] = Total(float(len(group[is_of_source].unique())))
        if reward is not None:
            stats[f"source/{source}/reward"] = Stat.of(reward, is_of_source & reward.isfinite())
    return stats


def _group_ages(batch: Batch, *, default: int) -> Batch:
    """Return one row without tokens for each group; column ``oldest``: see ``find_oldest_versions``."""
    oldest = find_oldest_versions(batch, default=default)
    return Batch(torch.zeros(len(oldest)), {}, {"oldest": oldest})
