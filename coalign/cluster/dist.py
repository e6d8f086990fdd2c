"""Models spread over processes: a DistActor is one replica with its ranks, a DistModel all replicas of a model.

A call returns a Future at once. Calls of one model run in the order in which they were made; calls of different models
run at the same time as far as their inputs and their devices allow. Nothing here depends on the type of cluster.

An executor spreads a call over the processes (coalign.cluster.executor).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.batch_shards import Sharding, ShardRecord
from coalign.cluster.executor import Executor, ModelCall
from coalign.cluster.future import Call, Future, Outcome, WorkerHandle, WorkerLost, WorkerTask, merge_answers, wait
from coalign.cluster.placement.nodes import NoPlaceError
from coalign.cluster.slices import Sliced, SliceScheduler
from coalign.cluster.worker import find_module_class
from coalign.config.schema import ModelConfig
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

    A batch is split over the replicas so that all take equally long; the result has the order of the batch. Any other
    attribute is a method of the module: ``model.my_method(batch, key=1)``.
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
        self.spmd = spmd  # the processes compute together
        self.sharding: Sharding  # set by `setup`, as is the executor
        self._executor: Executor
        self._sliced: Sliced | None = None  # set where a policy generates while its trainer trains
        self._queue = cluster.model_queue(name, config, self._ranks)
        self.takes_weights = False  # another model's: a process that is started again has none

    def generate(
        self: DistModel[Rollout], prompts: BatchRef | Future, *, record: ShardRecord | None = None, **keywords: Any
    ) -> Future:
        """Generate responses to prompts: a BatchRef.

        Finished shards are saved in ``record``; a repeated call reuses them instead of generating again.
        """
        record = None if self.spmd else record  # ranks that compute together are all called
        call = ModelCall("generate", (prompts,), keywords, by="work", record=record)
        if self._sliced is not None:
            return self.cluster.launch(Call(self.name, "generate"), partial(self._sliced.execute, call))
        return self._launch(call, recover=self._recover)

    def generate_continuously(self) -> None:
        """Generate in slices from now on (coalign.cluster.slices)."""
        max_in_flight = 1 if self.store.in_process else 2  # hide the transfer of an answer behind the next slice
        call = Call(self.name, "generate")
        scheduler = SliceScheduler(call, self._ranks, self.cluster.deadlines, max_in_flight, self._replace)
        self._sliced = Sliced(self, scheduler)

    @property
    def slices(self) -> SliceScheduler | None:
        """What keeps the replicas generating, if the policy generates while its trainer trains."""
        return None if self._sliced is None else self._sliced.scheduler

    def forward_step(self: DistModel[Scorer], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Compute columns for the rows of ``batch``: a BatchRef of these columns alone."""
        call = ModelCall("forward_step", (batch,), keywords, by="cost", by_row=True)
        return self._launch(call, recover=self._recover)

    def train_step(self: DistModel[Trainable], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Learn from ``batch``: Stats. The rows of each update do not depend on the number of ranks."""
        updates = self.config.updates_per_batch
        return self._launch(ModelCall("train_step", (batch,), keywords, by="cost", updates=updates))

    def eval_step(self: DistModel[Trainable], batch: BatchRef | Future, **keywords: Any) -> Future:
        """Compute the loss of ``batch``, without learning: Stats."""
        return self._launch(ModelCall("eval_step", (batch,), keywords, by="cost"))

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
        return self._launch(ModelCall(method, arguments, keywords), fatal=fatal)

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

    def trace(self, verb: str, *arguments: Any) -> Future:
        """Start (`start_trace`) or end (`stop_trace`) a trace on every rank, which then writes its file.

        A failure (a full disk) ends this call only, not the run.
        """

        def work(future: Future) -> Outcome:
            return merge_answers(*self._call_all_ranks(future, verb, {}, *arguments), self.store)

        return self.cluster.launch(Call(self.name, verb), work, self._queue, fatal=False)

    @property
    def processes(self) -> int:
        return len(self._ranks)

    @property
    def ranks(self) -> Sequence[WorkerHandle]:
        """The processes of all replicas."""
        return self._ranks

    def setup(self, context: Context) -> Future:
        """Build and load the modules."""
        self._contexts = [
            rank_context
            for replica, actor in enumerate(self.actors)
            for rank_context in actor.contexts(replace(context, replica=replica))
        ]
        self._choose_executor()
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
            self._choose_executor()

        self._queue.call(change)  # between two calls
        if self.slices is None:
            return leaving
        for rank in added:
            self.slices.add(rank)
        for rank in leaving:
            self.slices.retire(rank, partial(self.cluster.end_worker, rank))
        return []

    # ---- for executors ---------------------------------------------------------------------------------------------

    def find_needs(self, method: str) -> Sequence[str]:
        """Return the components of the model that a method computes with."""
        return self._needs.get(method, PARTS)

    def hold_devices(
        self, future: Future, method: str, needs: Mapping[str, Sequence[str]] | None = None
    ) -> AbstractContextManager[None]:
        """Reserve the devices for one call, with the components that it ``needs``, by model (None: the method's).

        A model that is not ``exclusive`` does not wait.
        """
        if not self._exclusive:
            return nullcontext()
        needs = {self.name: self.find_needs(method)} if needs is None else needs
        return self.cluster.hold_devices(self.name, future, method, needs)

    def wait_for(self, future: Future, method: str, tasks: list[WorkerTask]) -> list[Meta]:
        """Wait for the processes; see `wait`."""
        metas = wait(future, tasks, self.cluster.deadlines)
        self.cluster.residency.record(tasks, metas, method)
        return metas

    # ---- for the cluster -------------------------------------------------------------------------------------------

    def ping(self, lost: Container[str]) -> list[WorkerTask]:
        """Ask every process for an answer, but for the ``lost`` ones and those that will be started again with them."""
        living = [rank for rank in self._ranks if rank.name not in lost]
        together = self.spmd and len(living) < len(self._ranks)
        return [] if together else [rank.execute("ping") for rank in living]

    def release(self) -> list[WorkerTask]:
        """Start closing the modules."""
        return [rank.execute("close") for rank in self._ranks]

    # ---- private ---------------------------------------------------------------------------------------------------

    def _choose_executor(self) -> None:
        """Choose how calls are done by the processes that the model has now."""
        context = self._contexts[0]
        self.sharding = Sharding(
            self.config,
            self._ranks,
            spmd=self.spmd,
            keep_groups=context.keep_groups,
            compares_groups=context.loss is not None and context.loss.per == "group",
        )
        self._executor = self.cluster.choose_executor(self)

    def _launch(
        self, call: ModelCall, *, fatal: bool = True, recover: Callable[[WorkerLost], None] | None = None
    ) -> Future:
        name = Call(self.name, call.method)
        return self.cluster.launch(name, partial(self._execute, call), self._queue, fatal, call.inputs, recover)

    def _execute(self, call: ModelCall, future: Future) -> Outcome:
        return self._executor.execute(call, future)  # that of now: the processes may have changed since the call

    def _load(self, numbers: Sequence[int]) -> Future:
        """Build and load the modules of these processes."""

        def work(future: Future) -> Outcome:
            with self.hold_devices(future, "setup", {self.name: PARTS}):
                tasks = [self._ranks[i].execute("setup", self.config, self._contexts[i]) for i in numbers]
                self.wait_for(future, "setup", tasks)
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
            self._choose_executor()
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

    def _call_all_ranks(
        self, future: Future, verb: str, needs: Mapping[str, Sequence[str]], *arguments: Any
    ) -> tuple[list[WorkerTask], list[Meta]]:
        with self.hold_devices(future, future.call.method, needs):
            tasks = [rank.execute(verb, *arguments) for rank in self._ranks]
            return tasks, self.wait_for(future, future.call.method, tasks)
