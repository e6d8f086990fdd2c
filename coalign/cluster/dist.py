"""Models spread over processes: a DistActor is one replica with its ranks, a DistModel all replicas of a model.

A call returns a Future at once. Calls of one model run in the order in which they were made; calls of different models
run at the same time as far as their inputs and their devices allow. Nothing here depends on the type of cluster.

A batch is split over the replicas, and its rows are put together again (coalign.cluster.batch_shards).
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from coalign.cluster.batch_shards import (
    By,
    ShardedCall,
    ShardRecord,
    concat_outcomes,
    is_streamed,
    reorder,
    shard_leaves,
    shard_rows,
    shard_updates,
    stream_rows,
)
from coalign.cluster.future import (
    BatchRef,
    Call,
    Future,
    Meta,
    Outcome,
    TaskFuture,
    WorkerHandle,
    WorkerLost,
    WorkerTask,
    merge_answers,
    merge_chunks,
    wait,
    watch_task,
)
from coalign.cluster.placement.nodes import NoPlaceError
from coalign.cluster.slices import RowShare, SliceScheduler
from coalign.cluster.worker import find_module_class
from coalign.config.schema import ModelConfig, ProfileConfig
from coalign.memory import PARTS
from coalign.roles import Context, Rollout, Scorer, Trainable

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster

log = logging.getLogger(__name__)
Role = TypeVar("Role", covariant=True)  # a protocol of coalign.roles: what a model can be asked for


@dataclass(frozen=True, slots=True)
class DistActor:
    """One replica: its ranks in order, their device, and the address where they meet (None for a single rank)."""

    ranks: Sequence[WorkerHandle]
    device: str
    rendezvous: str | None = None

    def contexts(self, context: Context) -> list[Context]:
        """The context of each rank."""
        size = len(self.ranks)
        replica_context = replace(context, world_size=size, device=self.device, rendezvous=self.rendezvous)
        return [replace(replica_context, rank=rank) for rank in range(size)]


class DistModel(Generic[Role]):
    """All replicas of one model, in the ``Role`` that it has in the run.

    A batch is split over the replicas so that all take equally long; the result has the order of the batch.
    The ranks of an SPMD model are all called, even with an empty shard, since they meet in collectives; ranks that
    compute rows together get the same shard. Any other attribute is a method of the module:
    ``model.my_method(batch, key=1)``.
    """

    def __init__(
        self, name: str, config: ModelConfig, actors: Sequence[DistActor], cluster: Cluster, spmd: bool
    ) -> None:
        self.name = name
        self.config = config
        self.actors = actors
        self.cluster = cluster
        self.store = cluster.store
        self.syncing = threading.Lock()  # one weight sync at a time
        self.ready: Future  # the modules are loaded
        module = find_module_class(config)
        self._ranks = [rank for actor in actors for rank in actor.ranks]
        self._exclusive = module.exclusive
        self._needs = module.needs
        self._exact = config.reduction == "exact"  # rows are computed in leaves
        self.spmd = spmd  # the processes compute together
        self._count_shards()
        self._keep_groups = self._compares_groups = True
        self._queue = cluster.model_queue(name, config, self._ranks)
        self.slices: SliceScheduler | None = None  # set where a policy generates while its trainer trains
        self.takes_weights = False  # another model's: a process that is started again has none

    def generate(
        self: DistModel[Rollout], prompts: BatchRef | Future, *, record: ShardRecord | None = None, **keywords: Any
    ) -> Future:
        """Generate responses to prompts: a BatchRef.

        Finished shards are saved in ``record``; a repeated call reuses them instead of generating again.
        """
        call = Call(self.name, "generate")
        if self.slices is not None:
            work = partial(self._generate_in_slices, self.slices, prompts, record, keywords)
            return self.cluster.launch(call, work)
        record = None if self.spmd else record  # ranks that compute together are all called
        work = self._shard((prompts,), keywords, by="work", record=record)
        return self.cluster.launch(call, work, self._queue, inputs=[prompts, *keywords.values()], recover=self._recover)

    def generate_continuously(self) -> None:
        """Generate in slices from now on (coalign.cluster.slices)."""
        max_in_flight = 1 if self.store.in_process else 2  # hide the transfer of an answer behind the next slice
        call = Call(self.name, "generate")
        self.slices = SliceScheduler(call, self._ranks, self.cluster.deadlines, max_in_flight, self._replace)

    def forward_step(self: DistModel[Scorer], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Compute columns for the rows of ``batch``: a BatchRef of these columns alone."""
        work = self._shard((batch,), keywords, by="cost", by_row=True)
        call = Call(self.name, "forward_step")
        return self.cluster.launch(call, work, self._queue, inputs=[batch, *keywords.values()], recover=self._recover)

    def train_step(self: DistModel[Trainable], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Learn from ``batch``: Stats. The rows of each update do not depend on the number of ranks."""
        work = self._shard((batch,), keywords, by="cost", updates=self.config.updates_per_batch)
        return self.cluster.launch(Call(self.name, "train_step"), work, self._queue, inputs=[batch, *keywords.values()])

    def eval_step(self: DistModel[Trainable], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Compute the loss of ``batch``, without learning: Stats."""
        work = self._shard((batch,), keywords, by="cost")
        return self.cluster.launch(Call(self.name, "eval_step"), work, self._queue, inputs=[batch, *keywords.values()])

    def save(self, directory: str) -> Future:
        """Write everything needed to resume bit for bit. A failure (a full disk) ends this call only, not the run."""
        return self.call("save", directory, fatal=False)

    def load(self, directory: str) -> Future:
        """Load what ``save`` wrote."""
        return self.call("load", directory)

    def save_hf(self, directory: str, **keywords: Any) -> Future:
        """Write a directory that ``from_pretrained`` loads. A failure ends this call only, not the run."""
        return self.call("save_hf", directory, fatal=False, **keywords)

    def save_adapter(self, directory: str) -> Future:
        """Write the adapters alone, in peft's format. A failure ends this call only, not the run."""
        return self.call("save_adapter", directory, fatal=False)

    def call(self, method: str, *arguments: Any, fatal: bool = True, **keywords: Any) -> Future:
        """Call any method of the module. A plain result is the first worker's. An error of a ``fatal`` call ends the
        run.

        Batches among the positional arguments are split alike, so they must hold the same sequences. A batch passed by
        keyword is split independently.
        """
        work, inputs = self._shard(arguments, keywords), [*arguments, *keywords.values()]
        return self.cluster.launch(Call(self.name, method), work, self._queue, fatal, inputs)

    def __getattr__(self, method: str) -> Callable[..., Future]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        fatal: bool = True,
        components: Sequence[str] = ("weights",),
        beside: Sequence[DistModel[Any]] = (),
    ) -> Future:
        """Call ``function(module, store, *arguments)`` on every rank; the result lists what each rank returned.

        The function uses these ``components`` of the model, and the weights of the models ``beside`` it.
        """
        needs = {self.name: components, **{model.name: ("weights",) for model in beside}}

        def work(future: Future) -> Outcome:
            tasks, metas = self._call_all_ranks(future, "run", needs, function, *arguments)
            return replace(merge_answers(tasks, metas, self.store), result=[meta.value for meta in metas])

        return self.cluster.launch(Call(self.name, function.__name__), work, self._queue, fatal)

    def takes_turns_with(self, model: DistModel[Any]) -> bool:
        """Whether the two models share devices, so that a call of one may have to wait for a call of the other."""
        return self.cluster.slots[self.name] is self.cluster.slots[model.name]

    def start_trace(self, config: ProfileConfig, step: int) -> Future:
        """Start a trace on every rank."""
        return self._trace("start_trace", config, step)

    def stop_trace(self, directory: str) -> Future:
        """End the trace; every rank writes its file. A failure (a full disk) ends this call only, not the run."""
        return self._trace("stop_trace", directory)

    @property
    def processes(self) -> int:
        return len(self._ranks)

    @property
    def ranks(self) -> Sequence[WorkerHandle]:
        """The processes of all replicas."""
        return self._ranks

    def setup(self, context: Context) -> Future:
        """Build and load the modules."""
        self._keep_groups = context.keep_groups
        self._compares_groups = context.loss is not None and context.loss.per == "group"
        self._contexts = [
            rank_context
            for replica, actor in enumerate(self.actors)
            for rank_context in actor.contexts(replace(context, replica=replica))
        ]
        return self._load(range(len(self._ranks)))

    def stop_slices(self) -> None:
        """End generation in slices, whatever is under way."""
        if self.slices is not None:
            self.slices.close()
            self.slices.join()

    def restart(self, lost: Container[str]) -> bool:
        """Replace the ``lost`` processes (by name) by new ones, and load the model there; return whether any was lost.

        If the model's processes compute together, all of them are started again. A model that generates in slices
        gives up the slices under way.
        """
        gone = [number for number, rank in enumerate(self._ranks) if rank.name in lost]
        together = self.spmd and gone
        fresh = []
        for rank in [*self._ranks] if together else [self._ranks[number] for number in gone]:
            if (new := self._start_again(rank)) is not None:
                fresh.append(self._ranks.index(new))
        if together:
            address = self.cluster.find_rendezvous(self._ranks)
            self._contexts = [replace(context, rendezvous=address) for context in self._contexts]
        if fresh:
            self.ready = self._load(fresh)
        if self.slices is not None:
            self.call("stop_rolling")
            self.generate_continuously()
        return bool(gone)

    def resize(self, config: ModelConfig, added: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """Compute with ``config.processes`` processes: the first current ones, and those ``added``; return the rest.

        If the processes compute together, all of them are started again, without a training state. Replicas that
        generate in slices complete their rows, and end by themselves. Raises WorkerError if the model cannot be loaded.
        """
        size = config.processes
        kept, leaving = self._ranks[:size], self._ranks[size:]
        contexts = [replace(self._contexts[0], replica=number) for number in range(size)]
        fresh = range(len(kept), size)
        if self.spmd:
            kept, fresh = [rank.replace() for rank in kept], range(size)
            address = self.cluster.find_rendezvous([*kept, *added])
            together = replace(self._contexts[0], world_size=size, rendezvous=address)
            contexts = [replace(together, rank=number) for number in fresh]
        ranks = [*kept, *added]
        self._set_up(config, [(ranks[number], contexts[number]) for number in fresh])

        def change() -> None:
            self.config, self._ranks, self._contexts = config, ranks, contexts
            self._count_shards()

        self._queue.call(change)  # between two calls
        if self.slices is None:
            return leaving
        for rank in added:
            self.slices.add(rank)
        for rank in leaving:
            self.slices.retire(rank, partial(self.cluster.end_worker, rank))
        return []

    def ping(self, lost: Container[str]) -> list[WorkerTask]:
        """Ask every process for an answer, but for the ``lost`` ones and those that will be started again with them."""
        living = [rank for rank in self._ranks if rank.name not in lost]
        together = self.spmd and len(living) < len(self._ranks)
        return [] if together else [rank.execute("ping") for rank in living]

    def release(self) -> list[WorkerTask]:
        """Start closing the modules."""
        return [rank.execute("close") for rank in self._ranks]

    # ---- private ---------------------------------------------------------------------------------------------------

    def _count_shards(self) -> None:
        ranks = len(self._ranks)
        self._shard_of_rank = self.config.shares(ranks) if self.spmd else [*range(ranks)]
        self._shards = max(self._shard_of_rank) + 1
        # Ranks with the same shard give the same result, so only the first one's is merged.
        self._counted = [self._shard_of_rank.index(shard) for shard in range(self._shards)] if self.spmd else None

    def _load(self, numbers: Sequence[int]) -> Future:
        """Build and load the modules of these processes."""

        def work(future: Future) -> Outcome:
            with self._hold_devices(future, "setup", {self.name: PARTS}):
                tasks = [self._ranks[i].execute("setup", self.config, self._contexts[i]) for i in numbers]
                self._wait(future, "setup", tasks)
                return Outcome(None, {})

        return self.cluster.launch(Call(self.name, "setup"), work, self._queue)

    def _set_up(self, config: ModelConfig, processes: Sequence[tuple[WorkerHandle, Context]]) -> None:
        """Build and load the modules of processes that no call reaches yet. Raises WorkerError."""
        tasks = [rank.execute("setup", config, context) for rank, context in processes]
        wait(Future(Call(self.name, "setup")), tasks, self.cluster.deadlines)

    def _replace(self, former: WorkerHandle, lost: WorkerLost) -> WorkerHandle | None:
        """Start a lost process again, and load its model there; None: no device is free, others go on without it.

        Raises ``lost`` if no restart is left.
        """
        self.cluster.count_restart(lost)
        rank = self._start_again(former)
        if rank is not None:
            self._set_up(self.config, [(rank, self._contexts[self._ranks.index(rank)])])
        return rank

    def _start_again(self, former: WorkerHandle) -> WorkerHandle | None:
        """Start an empty process for a lost one; None: no device is free, and the replica is dropped.

        NoPlaceError for the last replica, and for processes that compute together.
        """
        number = self._ranks.index(former)
        try:
            rank = former.replace()
        except NoPlaceError as problem:
            if self.spmd or len(self._ranks) == 1:
                raise
            self.config = self.cluster.drop(former, self.name, len(self._ranks) - 1)
            self._ranks = [rank for rank in self._ranks if rank is not former]
            self._contexts = self._contexts[:-1]
            self._count_shards()
            log.warning("%s goes on with %d processes: %s", self.name, len(self._ranks), problem)
            return None
        self._ranks[number] = rank
        self.cluster.residency.replace(former.name, rank)
        return rank

    def _recover(self, lost: WorkerLost) -> None:
        """Start lost replicas again, so that the call can be made once more.

        Raises ``lost`` for a model whose processes compute together, or whose weights come from another model.
        """
        if self.spmd or self.takes_weights or lost.call.model != self.name:
            raise lost
        for rank in [*self._ranks]:
            if rank.name in lost.workers:
                self._replace(rank, lost)

    def _generate_in_slices(
        self,
        slices: SliceScheduler,
        prompts: BatchRef | Future,
        record: ShardRecord | None,
        keywords: dict[str, Any],
        future: Future,
    ) -> Outcome:
        """The work of ``generate`` in slices: submit the call's shares, wait for all, and merge them."""
        future.set_partial_results([])
        syncs = slices.syncs
        batch: BatchRef = self.cluster.resolve(prompts)
        named = {name: self.cluster.resolve(value) for name, value in keywords.items()}
        sharded = self._split(future.call, (batch,), named, "work", self.config.shares_per_replica)
        urgent = batch.group is not None and bool((batch.group < 0).any())  # the loop waits for evaluations
        shares = [RowShare(future, rows, options, syncs, urgent) for _, ((rows,), options) in sharded.calls]
        recorded = sharded.find_recorded(record)
        for number, share in enumerate(shares):
            if number in recorded:
                share.done.set_result(recorded[number])
            elif record is not None:
                share.done.add_done_callback(partial(_keep_share, sharded, record, number))
        slices.submit([share for number, share in enumerate(shares) if number not in recorded])
        for share in shares:
            concurrent.futures.wait([share.done, cast(Any, future.ended)], None, concurrent.futures.FIRST_COMPLETED)
            if future.done():
                future.result()  # raises
        tasks = [share.done.result() for share in shares]
        metas = [task.meta.result() for task in tasks]
        return sharded.restore_order(merge_answers(tasks, metas, self.store), metas)

    def _shard(
        self,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        by: By = "order",
        by_row: bool = False,
        updates: int | None = None,
        record: ShardRecord | None = None,
    ) -> Callable[[Future], Outcome]:
        """The work of a call of a method: split the batches ``by`` a measure, call every replica, merge the answers.

        ``by_row``: the method computes each row independently. ``updates``: the optimizer updates of a training step.
        ``record``: finished shards are saved there, and taken from it.
        """

        def work(future: Future) -> Outcome:
            method = future.call.method
            needs = {self.name: self._needs.get(method, PARTS)}
            self.cluster.residency.announce(self.name, needs[self.name])
            if by_row and self._can_stream(arguments[0]):
                return self._call_streamed(future, method, needs, arguments[0], keywords)
            # No tuple(generator): list_largest_tensors inspects all objects, and would break one that is being built.
            ready = [self.cluster.resolve(value) for value in arguments]
            named = {name: self.cluster.resolve(value) for name, value in keywords.items()}
            shards_per_replica = 1 if self.spmd else self.config.shares_per_replica
            sharded = self._split(future.call, tuple(ready), named, by, shards_per_replica, updates)
            with self._hold_devices(future, method, needs):
                if len(sharded.calls) > len(self._ranks):
                    tasks, metas = self._call_free_replicas(future, method, sharded, record)
                    return sharded.restore_order(merge_answers(tasks, metas, self.store), metas)
                started: list[list[WorkerTask]] = []
                recorded = sharded.find_recorded(record)
                for number, (rank, inputs) in enumerate(sharded.calls):
                    chunks = min(self.config.parts_per_call, len(inputs[0][0].which)) if method == "generate" else 1
                    if number in recorded:
                        started.append([recorded[number]])
                        continue
                    if chunks > 1:
                        first = ("first_part", method, chunks, *inputs)
                        started.append(rank.execute_all([first] + [("next_part", method)] * (chunks - 1)))
                    else:
                        started.append([rank.execute("call", method, *inputs)])
                    for task in started[-1]:
                        sharded.keep(record, number, task)
                tasks = [task for shard_tasks in started for task in shard_tasks]
                # The rows of one rank of several, or of an incomplete group, are useless alone.
                complete = self.spmd or self.config.spread_samples
                future.set_partial_results([] if complete else [watch_task(task) for task in tasks])
                metas = self._wait(future, method, tasks)
                outcome = merge_answers(tasks, metas, self.store, self._counted)
                merged = merge_chunks(metas, [len(shard_tasks) for shard_tasks in started])
                counted = merged if self._counted is None else [merged[i] for i in self._counted]
                return sharded.restore_order(outcome, counted)

        return work

    def _call_free_replicas(
        self, future: Future, method: str, sharded: ShardedCall, record: ShardRecord | None
    ) -> tuple[list[WorkerTask], list[Meta]]:
        """Give each replica its next shard when it is free; return tasks and Metas in the order of the shards."""
        results: list[TaskFuture] = [concurrent.futures.Future() for _ in sharded.calls]
        future.set_partial_results([] if self.config.spread_samples else results)
        recorded = sharded.find_recorded(record)
        waiting, free = list(enumerate(inputs for _, inputs in sharded.calls))[::-1], list(self._ranks)[::-1]
        busy: dict[Any, tuple[int, WorkerHandle, WorkerTask]] = {}  # by the future of the answer
        done: dict[int, tuple[WorkerTask, Meta]] = {}
        while waiting or busy:
            while waiting and free:
                (number, inputs), rank = waiting.pop(), free.pop()
                task = recorded.get(number) or rank.execute("call", method, *inputs)
                busy[task.meta] = number, rank, task
                if number not in recorded:
                    sharded.keep(record, number, task)
            future.running = [task for _, _, task in busy.values()]
            either = [*busy, future.ended]
            seconds = self.cluster.deadlines.find(future.call)
            ended, _ = concurrent.futures.wait(either, seconds, concurrent.futures.FIRST_COMPLETED)
            if not ended:
                raise self.cluster.deadlines.build_error(future, future.running)
            if future.done():
                future.result()  # raises
            for answer in ended:
                number, rank, task = busy.pop(answer)
                [meta] = self._wait(future, method, [task])
                done[number] = task, meta
                results[number].set_result(task)
                free.append(rank)
        return [done[number][0] for number in sorted(done)], [done[number][1] for number in sorted(done)]

    def _can_stream(self, value: Any) -> bool:
        """Whether rows of ``value`` can be computed before the others come.

        The model must be alone on its devices: another one would wait for them between two bundles of rows.
        """
        alone = len(self.cluster.slots[self.name].positions) == 1 and not self._exact
        return alone and not self.spmd and isinstance(value, Future) and is_streamed(value)

    def _call_streamed(
        self,
        future: Future,
        method: str,
        needs: Mapping[str, Sequence[str]],
        batch: Future,
        keywords: dict[str, Any],
    ) -> Outcome:
        """Call a method on each bundle of rows of ``batch`` as it comes; the result has the order of its rows."""
        named = {name: self.cluster.resolve(value) for name, value in keywords.items()}
        done: dict[int, Outcome] = {}
        for bundles in stream_rows(batch, self.store, len(self._ranks)):
            split = {position: self._split(future.call, (rows,), named, "cost") for position, rows in bundles.items()}
            with self._hold_devices(future, method, needs):
                tasks = {
                    position: [rank.execute("call", method, *rank_tasks) for rank, rank_tasks in sharded.calls]
                    for position, sharded in split.items()
                }
                metas = iter(self._wait(future, method, [task for rank_tasks in tasks.values() for task in rank_tasks]))
            for position, rank_tasks in tasks.items():
                answers = [next(metas) for _ in rank_tasks]
                done[position] = split[position].restore_order(merge_answers(rank_tasks, answers, self.store), answers)
        order = batch.ended.result().order
        return reorder(concat_outcomes([done[position] for position in sorted(done)]), order)

    def _trace(self, verb: str, *arguments: Any) -> Future:
        def work(future: Future) -> Outcome:
            return merge_answers(*self._call_all_ranks(future, verb, {}, *arguments), self.store)

        return self.cluster.launch(Call(self.name, verb), work, self._queue, fatal=False)

    def _call_all_ranks(
        self, future: Future, verb: str, needs: Mapping[str, Sequence[str]], *arguments: Any
    ) -> tuple[list[WorkerTask], list[Meta]]:
        with self._hold_devices(future, future.call.method, needs):
            tasks = [rank.execute(verb, *arguments) for rank in self._ranks]
            return tasks, self._wait(future, future.call.method, tasks)

    def _hold_devices(
        self, future: Future, method: str, needs: Mapping[str, Sequence[str]]
    ) -> AbstractContextManager[None]:
        """Reserve the devices for one call; a model that is not ``exclusive`` does not wait."""
        return self.cluster.hold_devices(self.name, future, method, needs) if self._exclusive else nullcontext()

    def _wait(self, future: Future, method: str, tasks: list[WorkerTask]) -> list[Meta]:
        metas = wait(future, tasks, self.cluster.deadlines)
        self.cluster.residency.record(tasks, metas, method)
        return metas

    def _split(
        self,
        call: Call,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        by: By,
        per_replica: int = 1,
        updates: int | None = None,
    ) -> ShardedCall:
        """Decide which rank gets which (arguments, keywords).

        Batches are split into ``per_replica`` shards per replica, each of a training step's ``updates`` separately;
        everything else is passed on unchanged.
        """
        values = {**dict(enumerate(arguments)), **keywords}
        batches = {key: value for key, value in values.items() if isinstance(value, BatchRef)}
        if not batches:
            return ShardedCall([(rank, (arguments, keywords)) for rank in self._ranks])
        alike = [key for key in batches if key not in keywords]
        if len(sizes := {len(batches[key]) for key in alike}) > 1:
            raise ValueError(f"{call}: the batches hold {sorted(sizes)} sequences; expected the same ones in each")
        count = self._shards * per_replica
        has_loss = "loss" in keywords  # not the context's: it may compare the samples of a group
        keep_groups = not self.config.spread_samples if by == "work" else self._keep_groups or has_loss
        split = partial(shard_updates, updates=updates) if updates else partial(shard_rows, by=by)
        if self._exact and by == "cost":
            keep_groups = self._compares_groups or has_loss
            split = partial(shard_leaves, updates=updates or 1, max_tokens=self.config.max_tokens_per_micro)
        split_keys = [key for key in batches if key in keywords or key == alike[0]]
        shards = {key: split(batches[key], count, keep_groups=keep_groups) for key in split_keys}
        shards |= {key: replace(shards[alike[0]], batch=batches[key]) for key in alike}
        rows = {key: batch_shards.worker_rows for key, batch_shards in shards.items()}

        def build_call(shard: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            inputs = {key: rows[key][shard] if key in rows else value for key, value in values.items()}
            return tuple([inputs[i] for i in range(len(arguments))]), {name: inputs[name] for name in keywords}

        filled = [i for i in range(count) if any(len(batch_shards.rows[i]) for batch_shards in shards.values())] or [0]
        chosen = [*range(count)] if self.spmd else filled
        ranks = (
            zip(self._ranks, self._shard_of_rank, strict=True)
            if self.spmd
            else zip(cycle(self._ranks), range(count), strict=False)
        )
        calls = [(rank, build_call(shard)) for rank, shard in ranks if shard in chosen]
        return ShardedCall(calls, next(iter(shards.values())), chosen)


def _keep_share(sharded: ShardedCall, record: ShardRecord, position: int, done: TaskFuture) -> None:
    if done.exception() is None:
        sharded.keep(record, position, done.result())
