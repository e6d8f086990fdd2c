"""Models spread over processes: DistActor is one replica with its ranks, DistModel all replicas of a model.

A call returns a Future at once. The calls of one model run in the order they were made; calls of different models run
side by side as far as their inputs and their devices allow. Nothing here knows where the workers are.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from coalign.cluster.answers import (
    Answer,
    Running,
    WorkerHandle,
    arriving,
    by_share,
    combine,
    is_streamed,
    silence,
    wait,
    when_answered,
)
from coalign.cluster.balance import By, Shares, in_order, joined, shard_rows, shard_updates
from coalign.cluster.future import BatchRef, Call, Future, Meta, Outcome
from coalign.cluster.worker import module_class
from coalign.config.schema import ModelConfig, ProfileConfig
from coalign.memory.arena import PARTS
from coalign.roles import Context, Rollout, Scorer, Trainable

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster

Role = TypeVar("Role", covariant=True)  # of coalign.roles: what a model can be asked for


@dataclass(frozen=True, slots=True)
class DistActor:
    """One replica: its ranks in order, their device, and where they meet (None for a single one)."""

    ranks: Sequence[WorkerHandle]
    device: str
    rendezvous: str | None = None

    def contexts(self, context: Context) -> list[Context]:
        """What each rank is told."""
        size = len(self.ranks)
        own = replace(context, world_size=size, device=self.device, rendezvous=self.rendezvous)
        return [replace(own, rank=rank) for rank in range(size)]


class DistModel(Generic[Role]):
    """All replicas of one model, in the ``Role`` that it has in the run.

    A batch is dealt out in shares that take equally long (coalign.cluster.balance), prompts by the work they promise;
    the result has the order of the batch. Other methods get neighbours. SPMD models are called on every rank, even with
    an empty share, since their ranks meet in collectives; neighbouring ranks that compute rows together receive the
    same share. An attribute that is not here is a method of the module: ``model.my_method(batch, key=1)``.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        actors: Sequence[DistActor],
        cluster: Cluster,
        turn: Callable[..., AbstractContextManager[None]],
        spmd: bool,
    ) -> None:
        self.name = name
        self.config = config
        self.actors = actors
        self.cluster = cluster
        self.store = cluster.store
        self.syncing = threading.Lock()  # one weight sync at a time
        self.ready: Future  # the modules are loaded
        self._ranks = [rank for actor in actors for rank in actor.ranks]
        self._turn = turn  # (future, method, needs): has the model's devices for the time of one call
        self._parts = module_class(config).needs
        self._spmd = spmd
        self._share_of = config.shares(len(self._ranks)) if spmd else [*range(len(self._ranks))]
        # Of the ranks that are given the same share the first one tells the result.
        self._counted = [self._share_of.index(share) for share in range(max(self._share_of) + 1)] if spmd else None
        self._whole_groups = True
        self._shares_each = 1 if spmd else config.shares_per_replica
        self._queue = cluster.call_queue(name)

    def generate(self: DistModel[Rollout], prompts: BatchRef | Future, **keywords: Any) -> Future:
        """Responses to prompts: a BatchRef."""
        return self._call("generate", (prompts,), keywords, by="work")

    def forward_step(self: DistModel[Scorer], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Columns for the rows of ``batch``: a BatchRef of these columns alone."""
        return self._call("forward_step", (batch,), keywords, by="cost", by_row=True)

    def train_step(self: DistModel[Trainable], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Learn from ``batch``: Stats. Its updates are cut here, whatever the number of ranks (deal_updates)."""
        return self._call("train_step", (batch,), keywords, by="cost", updates=self.config.updates_per_batch)

    def eval_step(self: DistModel[Trainable], batch: BatchRef | Future, **keywords: Any) -> Future:
        """The loss of ``batch``, without learning: Stats."""
        return self._call("eval_step", (batch,), keywords, by="cost")

    def save(self, directory: str) -> Future:
        """Write everything to resume bit for bit. A failure (a full disk) ends this call only, not the run."""
        return self._call("save", (directory,), {}, fatal=False)

    def load(self, directory: str) -> Future:
        """Take back what ``save`` wrote."""
        return self._call("load", (directory,), {})

    def save_hf(self, directory: str, **keywords: Any) -> Future:
        """Write a directory that ``from_pretrained`` loads. A failure ends this call only, not the run."""
        return self._call("save_hf", (directory,), keywords, fatal=False)

    def save_adapter(self, directory: str) -> Future:
        """Write the adapters alone, in peft's format. A failure ends this call only, not the run."""
        return self._call("save_adapter", (directory,), {}, fatal=False)

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Future:
        """Any method of the module. A plain result is the first worker's.

        Several batches among the positional arguments are cut alike: they must hold the same sequences. A batch given
        by keyword is cut on its own.
        """
        return self._call(method, arguments, keywords)

    def __getattr__(self, method: str) -> Callable[..., Future]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        fatal: bool = True,
        parts: Sequence[str] = ("weights",),
        beside: Sequence[DistModel[Any]] = (),
    ) -> Future:
        """``function(module, store, *arguments)`` on every rank; the result lists what each of them returned.

        It works on these ``parts`` of the model, and on the weights of the models ``beside`` it.
        """
        needs = {self.name: parts, **{other.name: ("weights",) for other in beside}}

        def work(future: Future) -> Outcome:
            running, metas = self._everywhere(future, "run", needs, function, *arguments)
            return replace(combine(running, metas, self.store), result=[meta.value for meta in metas])

        return self.cluster.launch(Call(self.name, function.__name__), work, self._queue.submit, fatal)

    def takes_turns_with(self, other: DistModel[Any]) -> bool:
        """Whether a call of one of the two may have to wait until a call of the other one has ended."""
        return self.cluster.slots[self.name] is self.cluster.slots[other.name]

    def start_trace(self, config: ProfileConfig, step: int) -> Future:
        """Have every rank trace what it does from now on."""
        return self._verb("start_trace", config, step)

    def stop_trace(self, directory: str) -> Future:
        """End the trace; every rank writes its file. A failure (a full disk) ends this call only, not the run."""
        return self._verb("stop_trace", directory)

    @property
    def processes(self) -> int:
        return len(self._ranks)

    def setup(self, context: Context) -> Future:
        """Build and load the modules."""
        self._whole_groups = context.whole_groups
        contexts = [
            each
            for replica, actor in enumerate(self.actors)
            for each in actor.contexts(replace(context, replica=replica))
        ]

        def work(future: Future) -> Outcome:
            with self._turn(future, "setup", {self.name: PARTS}):
                pairs = zip(self._ranks, contexts, strict=True)
                running = [rank.execute("setup", self.config, each) for rank, each in pairs]
                return self._outcome(future, "setup", running)

        return self.cluster.launch(Call(self.name, "setup"), work, self._queue.submit)

    def release(self) -> list[Running]:
        """Let the modules give back what they took."""
        return [rank.execute("close") for rank in self._ranks]

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        by: By = "order",
        fatal: bool = True,
        by_row: bool = False,
        updates: int | None = None,
    ) -> Future:
        needs = {self.name: self._parts.get(method, PARTS)}

        def work(future: Future) -> Outcome:
            self.cluster.residency.announce(self.name, needs[self.name])
            if by_row and self._takes_parts_of(arguments[0]):
                return self._as_they_come(future, method, needs, arguments[0], keywords)
            # No tuple from a generator that waits: a thread that looks at all objects (memory_report) would break it.
            ready = [self.cluster.resolve(value) for value in arguments]
            named = {name: self.cluster.resolve(value) for name, value in keywords.items()}
            shares = self._shares(future.call, tuple(ready), named, by, self._shares_each, updates)
            with self._turn(future, method, needs):
                running, metas, counts = self._share_out(future, method, shares)
                outcome = combine(running, metas, self.store, self._counted)
                told = by_share(metas, counts)
                return shares.restored(outcome, told if self._counted is None else [told[i] for i in self._counted])

        return self.cluster.launch(Call(self.name, method), work, self._queue.submit, fatal)

    def _share_out(self, future: Future, method: str, shares: Shares) -> tuple[list[Running], list[Meta], list[int]]:
        """Each share to its rank, all at once; or, if there are more, to whichever replica is free. What is under way,
        what it gave, and in how many parts each share did."""
        if len(shares.calls) <= len(self._ranks):
            started = [self._begin(rank, method, *own) for rank, own in shares.calls]
            running = [part for parts in started for part in parts]
            apart = self._spmd or self.config.spread_samples  # a rank's rows mean nothing alone, nor parts of a group
            future.comes_in([] if apart else [when_answered(each) for each in running])
            return running, self._wait(future, method, running), [len(parts) for parts in started]
        answers: list[Answer] = [concurrent.futures.Future() for _ in shares.calls]
        future.comes_in([] if self.config.spread_samples else answers)
        waiting, free = list(enumerate(own for _, own in shares.calls))[::-1], list(self._ranks)[::-1]
        busy: dict[Any, tuple[int, WorkerHandle, Running]] = {}  # by the future of the answer
        done: dict[int, tuple[Running, Meta]] = {}
        while waiting or busy:
            while waiting and free:
                (number, own), rank = waiting.pop(), free.pop()
                running = rank.execute("call", method, *own)
                busy[running.meta] = number, rank, running
            future.running = [running for _, _, running in busy.values()]
            ended, _ = concurrent.futures.wait(busy, self.cluster.timeout, concurrent.futures.FIRST_COMPLETED)
            if not ended:
                raise silence(future, future.running, self.cluster.timeout)
            for answer in ended:
                number, rank, running = busy.pop(answer)
                [meta] = self._wait(future, method, [running])
                done[number] = running, meta
                answers[number].set_result(running)
                free.append(rank)
        running, metas = zip(*(done[number] for number in sorted(done)), strict=True)
        return list(running), list(metas), [1] * len(done)

    def _begin(
        self, rank: WorkerHandle, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> list[Running]:
        """A call of one rank: of `generate`, in as many parts as the model hands over."""
        parts = min(self.config.parts_per_call, len(arguments[0].which)) if method == "generate" else 1
        if parts <= 1:
            return [rank.execute("call", method, arguments, keywords)]
        first = ("first_part", method, parts, arguments, keywords)
        return rank.in_parts([first] + [("next_part", method)] * (parts - 1))

    def _takes_parts_of(self, value: Any) -> bool:
        """Whether rows of ``value`` can be computed before the others: nothing but them would be waited for, and nobody
        wants the devices between two parts."""
        alone = len(self.cluster.slots[self.name].places) == 1
        return alone and not self._spmd and isinstance(value, Future) and is_streamed(value)

    def _as_they_come(
        self,
        future: Future,
        method: str,
        needs: Mapping[str, Sequence[str]],
        batch: Future,
        keywords: dict[str, Any],
    ) -> Outcome:
        """A call by rows on what is there of ``batch``, again and again; the result has the order of its rows."""
        named = {name: self.cluster.resolve(value) for name, value in keywords.items()}
        done: dict[int, Outcome] = {}
        for bundles in arriving(batch, self.store, len(self._ranks)):
            shares = {at: self._shares(future.call, (rows,), named, "cost") for at, rows in bundles.items()}
            with self._turn(future, method, needs):
                calls = [(at, rank.execute("call", method, *own)) for at in shares for rank, own in shares[at].calls]
                metas = self._wait(future, method, [running for _, running in calls])
            for at in shares:
                mine = [(running, meta) for (its, running), meta in zip(calls, metas, strict=True) if its == at]
                running, told = zip(*mine, strict=True)
                done[at] = shares[at].restored(combine(running, told, self.store), told)
        order = batch.ended.result().order
        return in_order(joined([done[at] for at in sorted(done)]), order)

    def _verb(self, verb: str, *arguments: Any) -> Future:
        def work(future: Future) -> Outcome:
            return combine(*self._everywhere(future, verb, {}, *arguments), self.store)

        return self.cluster.launch(Call(self.name, verb), work, self._queue.submit, fatal=False)

    def _everywhere(
        self, future: Future, verb: str, needs: Mapping[str, Sequence[str]], *arguments: Any
    ) -> tuple[list[Running], list[Meta]]:
        with self._turn(future, future.call.method, needs):
            running = [rank.execute(verb, *arguments) for rank in self._ranks]
            return running, self._wait(future, future.call.method, running)

    def _wait(self, future: Future, method: str, running: list[Running]) -> list[Meta]:
        metas = wait(future, running, self.cluster.timeout)
        self.cluster.residency.note(running, metas, method)
        return metas

    def _outcome(self, future: Future, method: str, running: list[Running]) -> Outcome:
        metas = self._wait(future, method, running)
        return combine(running, metas, self.store, self._counted)

    def _shares(
        self,
        call: Call,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        by: By,
        each: int = 1,
        updates: int | None = None,
    ) -> Shares:
        """Which rank gets which (arguments, keywords): batches dealt out (of a training step, each of its ``updates``),
        everything else as it is."""
        values = {**dict(enumerate(arguments)), **keywords}
        batches = {key: value for key, value in values.items() if isinstance(value, BatchRef)}
        if not batches:
            return Shares([(rank, (arguments, keywords)) for rank in self._ranks])
        alike = [key for key in batches if key not in keywords]
        if len(sizes := {len(batches[key]) for key in alike}) > 1:
            raise ValueError(f"{call}: the batches hold {sorted(sizes)} sequences; expected the same ones in each")
        count = (max(self._share_of) + 1) * each
        named = "loss" in keywords  # another one than the context's, of which nothing is known here
        whole = not self.config.spread_samples if by == "work" else self._whole_groups or named
        own_deal = [key for key in batches if key in keywords or key == alike[0]]
        dealt = partial(shard_updates, updates=updates) if updates else partial(shard_rows, by=by)
        deals = {key: dealt(batches[key], count, whole_groups=whole) for key in own_deal}
        deals |= {key: replace(deals[alike[0]], given=batches[key]) for key in alike}
        given = {key: each.shares for key, each in deals.items()}

        def share(part: int) -> tuple[Any, ...]:
            own = {key: given[key][part] if key in given else value for key, value in values.items()}
            return tuple(own[i] for i in range(len(arguments))), {name: own[name] for name in keywords}

        filled = [part for part in range(count) if any(len(each.rows[part]) for each in deals.values())] or [0]
        chosen = [*range(count)] if self._spmd else filled
        ranks = zip(self._ranks, self._share_of, strict=True) if self._spmd else zip(cycle(self._ranks), range(count))
        calls = [(rank, share(part)) for rank, part in ranks if part in chosen]
        return Shares(calls, next(iter(deals.values())), chosen)
