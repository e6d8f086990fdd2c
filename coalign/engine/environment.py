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
from typing import TYPE_CHECKING, Any

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.data.batch import Batch
from coalign.data.loader import Loader
from coalign.engine.rollouts.bundle import METRIC_TYPES, Bundle, count, describe, describe_sources, group_ages
from coalign.engine.rollouts.events import CollectedBundle, RolloutEvents
from coalign.engine.rollouts.pool import GroupPool, ReadyGroups, count_groups, list_groups
from coalign.engine.rollouts.selection import GroupSelection, filter_groups, pass_rates, response_lengths
from coalign.engine.rollouts.unfinished import CompleteGroups
from coalign.types import Stat, Stats, Total, merge_stats

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster


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
        unfinished: CompleteGroups,
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
        self.events = RolloutEvents()  # nobody listens

    def listen(self, listener: RolloutEvents) -> None:
        """Tell ``listener`` from now on what happens to groups."""
        self.events = listener

    def next(self, version: int, served: int) -> tuple[BatchRef, Stats]:
        """Return the batch that the step at this weight version trains on, and its metrics (`time/rollout`: s waited).

        ``served`` is the version that generates, older than ``version`` between two syncs (`sync.every`). RuntimeError
        if no group is left to train on.
        """
        started_at = time.perf_counter()
        expired = self.pool.expire(version)
        self.events.expired(expired)
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
            counts |= {"rollout/expired": Total(count_groups(expired)), "rollout/waiting": Total(len(self.pool))}
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
        self.events.drawn(step + 1, version, chunks)
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
                batches["ages"] = self.cluster.transform(group_ages, groups, default=version)
        if (described := self.events.begun(complete)) is not None:  # outside of `watch`: no metric of the step
            batches["samples"] = described
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
        described = done.batches.pop("samples", None)  # from `events.begun`: no step waits for it
        for batch in done.batches.values():
            if isinstance(batch, Future):
                batch.wait(self.on_wait)
        batches, stats = done.wait()
        if (curriculum := self.selection.curriculum) and "shares" in batches:
            stats = merge_stats([stats, curriculum.note(batches["shares"].fetch(), version)])
        if (lengths := self.selection.lengths) and "lengths" in batches:
            lengths.note(batches["lengths"].fetch())
        if "groups" in batches and done.prompts and self.unfinished.config.environments:
            kept, groups = set(list_groups(batches["groups"].group)), done.prompts["group"].tolist()
            rows = zip(done.prompts["rows"], groups, strict=True)
            self.loader.give_back(row for row, group in rows if group not in kept)
        if "groups" in batches and len(batches["groups"]):
            ages = batches["ages"].fetch()["oldest"] if "ages" in batches else done.version
            self.pool.add(batches["groups"], ages)
        if described is not None:
            prompted = list_groups(done.prompts["group"]) if done.prompts else []
            kept, continued = list_groups(batches["groups"].group), self.unfinished.list_continued()
            self.events.collected(CollectedBundle(described, prompted, kept, continued, stats))
        return stats

    def _update_kept_share(self, stats: Stats) -> None:
        kept, dropped = (stats[name].value if name in stats else 0.0 for name in ("filter/kept", "filter/dropped"))
        if kept + dropped:
            self.kept_share = kept / (kept + dropped)

    def _begin_restored(self, version: int, step: int, bundle: Bundle) -> Bundle:
        """Run the flow on a bundle whose samples were not complete at the checkpoint; return any other unchanged."""
        if bundle.batches or bundle.prompts is None:
            return bundle
        self.events.repeated(bundle.prompts, version)
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
            if self.unfinished.config.environments:
                batch = self.cluster.apply(describe_sources, batch, by_environment=True)
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
        self.events.taken(version + 1, waited.group, taken.group)
        return taken, described

    def _explain_empty_pool(self, version: int, stats: Stats) -> str:
        text, selection = f"step {version + 1}: there is no group to train on", self.selection
        rounds = f"{stats['rollout/rounds'].value:g} rollouts"
        if "episode/empty" in stats and stats["episode/empty"].value == 1:
            rollout = self.unfinished.config
            name, key = (
                (", ".join(rollout.environments), "environments") if rollout.environments else (rollout.fn, "fn")
            )
            return f"{text}: the environment `{name}` (rollout.{key}) has asked the policy for no turn"
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
        self.pool.restore([ReadyGroups(self.cluster.put(entry["batch"]), entry["version"]) for entry in state["pool"]])
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
