"""How the processes of a model do a call of it. `choose_executor` decides when the model starts, once.

==============  =======================================================================================================
AllRanks        every process computes its shard at once; the driver waits for all of them
_InChunks       the same, and a generator hands over what it has in several chunks
FreeReplicas    a batch has more shards than the model has replicas: each takes the next one when it is free
_Streamed       rows are computed as they come from the replicas of another model
Sliced          a policy generates while its trainer trains (coalign.cluster.slices)
_Prefetched     components that a call needs come onto the device while its inputs are computed (EMS)
InProcess       the model is an object of this process (coalign.cluster.local)
==============  =======================================================================================================
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from coalign.cluster.batch_ref import Meta
from coalign.cluster.batch_shards import (
    By,
    ShardedCall,
    ShardRecord,
    concat_outcomes,
    is_streamed,
    reorder,
    stream_rows,
)
from coalign.cluster.future import (
    Future,
    Outcome,
    TaskFuture,
    WorkerHandle,
    WorkerTask,
    merge_answers,
    merge_chunks,
    watch_task,
)

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a model's ``method``.

    Its batches are split ``by`` a measure, each of the ``updates`` of a training step separately. ``by_row``: the
    method computes each row independently. Finished shards are saved in ``record``; a repeated call takes them from it.
    """

    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    by: By = "order"
    by_row: bool = False
    updates: int | None = None
    record: ShardRecord | None = None

    @property
    def inputs(self) -> list[Any]:
        return [*self.arguments, *self.keywords.values()]

    def resolve(self, resolve: Callable[[Any], Any]) -> ModelCall:
        """Wait for the inputs; return the call with what ``resolve`` (Cluster.resolve) makes of each."""
        # No tuple(generator): list_largest_tensors inspects all objects, and would break one that is being built.
        arguments = tuple([resolve(value) for value in self.arguments])
        return replace(self, arguments=arguments, keywords={name: resolve(v) for name, v in self.keywords.items()})


class Executor(Protocol):
    """Spreads a call of a model over its processes, and merges what they answer."""

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        """Wait for the inputs, compute, and return the outcome of ``future``. Raises what `wait` raises."""
        ...


class AllRanks:
    """Every process gets its shard at once, and the driver waits for all of them."""

    shards_per_replica = 1

    def __init__(self, model: DistModel[Any]) -> None:
        self.model, self.sharding = model, model.sharding

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        sharded = self.split(call, future)
        with self.model.hold_devices(future, call.method):
            started = self._start(call, sharded)
            tasks = [task for shard_tasks in started for task in shard_tasks]
            # The rows of one rank of several, or of an incomplete group, are useless alone.
            future.set_partial_results([watch_task(task) for task in tasks] if self.sharding.is_separable else [])
            metas = self.model.wait_for(future, call.method, tasks)
        outcome = merge_answers(tasks, metas, self.model.store, self.sharding.counted)
        merged = merge_chunks(metas, [len(shard_tasks) for shard_tasks in started])
        counted = self.sharding.counted
        return sharded.restore_order(outcome, merged if counted is None else [merged[i] for i in counted])

    def split(self, call: ModelCall, future: Future) -> ShardedCall:
        """Wait for the inputs, and decide which process gets which rows."""
        call = call.resolve(self.model.cluster.resolve)
        inputs = call.arguments, call.keywords
        return self.sharding.split(future.call, *inputs, call.by, self.shards_per_replica, call.updates)

    def _start(self, call: ModelCall, sharded: ShardedCall) -> list[list[WorkerTask]]:
        """Start every shard that is not recorded; return the tasks of each."""
        recorded = sharded.find_recorded(call.record)
        started = []
        for position, (rank, inputs) in enumerate(sharded.calls):
            tasks = [recorded[position]] if position in recorded else self._start_shard(call.method, rank, inputs)
            if position not in recorded:
                for task in tasks:
                    sharded.keep(call.record, position, task)
            started.append(tasks)
        return started

    def _start_shard(self, method: str, rank: WorkerHandle, inputs: tuple[Any, Any]) -> list[WorkerTask]:
        return [rank.execute("call", method, *inputs)]


class _InChunks(AllRanks):
    """What a replica generates comes in several chunks, so that the next model can begin with the first one."""

    def _start_shard(self, method: str, rank: WorkerHandle, inputs: tuple[Any, Any]) -> list[WorkerTask]:
        arguments, _ = inputs
        chunks = min(self.model.config.parts_per_call, len(arguments[0].which)) if method == "generate" else 1
        if chunks < 2:
            return super()._start_shard(method, rank, inputs)
        first = rank.execute("first_part", method, chunks, *inputs)
        return [first, *(rank.execute("next_part", method) for _ in range(chunks - 1))]


class FreeReplicas(AllRanks):
    """A batch has ``models.<name>.shares_per_replica`` shards for each replica, which takes its next one when free."""

    def __init__(self, model: DistModel[Any]) -> None:
        super().__init__(model)
        self.shards_per_replica = model.config.shares_per_replica

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        sharded = self.split(call, future)
        results: list[TaskFuture] = [concurrent.futures.Future() for _ in sharded.calls]
        with self.model.hold_devices(future, call.method):
            future.set_partial_results(results if self.sharding.is_separable else [])
            done = self._call_in_turn(call, future, sharded, results)
        tasks, metas = zip(*(done[position] for position in sorted(done)), strict=True)
        return sharded.restore_order(merge_answers(tasks, metas, self.model.store), metas)

    def _call_in_turn(
        self, call: ModelCall, future: Future, sharded: ShardedCall, results: Sequence[TaskFuture]
    ) -> dict[int, tuple[WorkerTask, Meta]]:
        """Give each replica its next shard when it is free; return task and Meta by the shard's position."""
        deadlines, recorded = self.model.cluster.deadlines, sharded.find_recorded(call.record)
        waiting, free = [*range(len(sharded.calls))][::-1], [*self.sharding.ranks][::-1]
        busy: dict[Any, tuple[int, WorkerHandle, WorkerTask]] = {}  # by the future of the answer
        done: dict[int, tuple[WorkerTask, Meta]] = {}
        while waiting or busy:
            while waiting and free:
                position, rank = waiting.pop(), free.pop()
                _, inputs = sharded.calls[position]
                task = recorded.get(position) or rank.execute("call", call.method, *inputs)
                busy[task.meta] = position, rank, task
                if position not in recorded:
                    sharded.keep(call.record, position, task)
            future.running = [task for _, _, task in busy.values()]
            either = [*busy, future.ended]
            ended, _ = concurrent.futures.wait(either, deadlines.find(future.call), concurrent.futures.FIRST_COMPLETED)
            if not ended:
                raise deadlines.build_error(future, future.running)
            if future.done():
                future.result()  # raises
            for answer in ended:
                position, rank, task = busy.pop(answer)
                [meta] = self.model.wait_for(future, call.method, [task])
                done[position] = task, meta
                results[position].set_result(task)
                free.append(rank)
        return done


class _Streamed:
    """Computes rows as they come from the replicas of another model; other calls go to ``executor``.

    The model must be alone on its devices: another one would wait for them between two bundles of rows.
    """

    def __init__(self, executor: AllRanks) -> None:
        self._executor = executor

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        batch = call.arguments[0] if call.by_row else None
        if not isinstance(batch, Future) or not is_streamed(batch):
            return self._executor.execute(call, future)
        model, sharding = self._executor.model, self._executor.sharding
        keywords = {name: model.cluster.resolve(value) for name, value in call.keywords.items()}
        done: dict[int, Outcome] = {}
        for bundles in stream_rows(batch, model.store, len(sharding.ranks)):
            split = {place: sharding.split(future.call, (rows,), keywords, call.by) for place, rows in bundles.items()}
            with model.hold_devices(future, call.method):
                tasks = {
                    place: [rank.execute("call", call.method, *inputs) for rank, inputs in sharded.calls]
                    for place, sharded in split.items()
                }
                all_tasks = [task for bundle_tasks in tasks.values() for task in bundle_tasks]
                metas = iter(model.wait_for(future, call.method, all_tasks))
            for place, bundle_tasks in tasks.items():
                answers = [next(metas) for _ in bundle_tasks]
                outcome = merge_answers(bundle_tasks, answers, model.store)
                done[place] = split[place].restore_order(outcome, answers)
        outcome = concat_outcomes([done[place] for place in sorted(done)])
        return reorder(outcome, batch.ended.result().order)


class _Prefetched:
    """Lets the components that a call needs come onto the device while its inputs are computed (EMS)."""

    def __init__(self, model: DistModel[Any], executor: Executor) -> None:
        self._model, self._executor = model, executor

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        self._model.cluster.residency.announce(self._model.name, self._model.find_needs(call.method))
        return self._executor.execute(call, future)


def choose_executor(model: DistModel[Any]) -> Executor:
    """Choose how the processes of a model do its calls, by its configuration and its devices."""
    config, slot = model.config, model.cluster.slots[model.name]
    if not model.spmd and config.shares_per_replica > 1:
        ranks: AllRanks = FreeReplicas(model)
    else:
        ranks = (_InChunks if config.parts_per_call > 1 else AllRanks)(model)
    streams = len(slot.positions) == 1 and not model.spmd and config.reduction != "exact"
    executor = _Streamed(ranks) if streams else ranks
    return _Prefetched(model, executor) if slot.name in model.cluster.residency.slots else executor
