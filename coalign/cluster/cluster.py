"""The base class of all clusters, which starts models, runs calls, and ends everything at the first error.

``start_cluster`` makes the cluster that a configuration asks for.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from coalign.cluster.batch_ref import BatchRef, Meta, Store, WorkerFailure
from coalign.cluster.choice import find_footprint, plan_slots
from coalign.cluster.dist import DistActor, DistModel
from coalign.cluster.executor import Executor, choose_executor
from coalign.cluster.future import (
    Call,
    CallDeadlines,
    Future,
    Outcome,
    WatchedCalls,
    WorkerHandle,
    WorkerLost,
    merge_answers,
    wait,
)
from coalign.cluster.placement.nodes import Node, ProcessPlacement, assign_nodes, place_processes
from coalign.cluster.placement.slots import Footprint, Slot, list_slots, pack_slots
from coalign.cluster.residency import Residency
from coalign.cluster.slices import MAX_LOSSES
from coalign.cluster.worker import find_module_class, name_of
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.threads import CallQueue, start_thread

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)
PING_SECONDS = 60.0  # a living worker has finished its earlier calls by then
POLL_SECONDS = 0.01
CLOSE_SECONDS = 5.0  # how long modules may take to release what they hold


class Cluster(ABC):
    """Runs the models of one run in processes on devices. A context manager: at its end every worker ends.

    The first error of any call ends all other calls with the same error. Only ``save``, ``save_hf`` and weight updates
    may fail alone. The workers go on until ``shutdown``, so that the last consistent state can be saved.

    ``on_call``, if set, is called with each new Future, on the thread that makes the call; ``on_end`` with each Future
    and its outcome, just before others see it.
    """

    store: Store

    def __init__(self, config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> None:
        """``models`` are the models that will run (None: all of the configuration)."""
        models = config.models if models is None else models
        self.deadlines = CallDeadlines(config.runtime.call_timeout)
        self.models: dict[str, DistModel] = {}
        self.on_call: Callable[[Future], None] | None = None
        self.on_end: Callable[[Future, Outcome], None] | None = None
        self.error: BaseException | None = None  # the first one
        self.in_order = True  # see any_order
        self._restarts = self._reported_restarts = 0
        self._max_restarts = config.runtime.restarts
        self._refuses_calls = False
        self._defers_errors = False
        self._pending: set[Future] = set()
        self._lock = threading.Lock()
        self._queues: list[CallQueue] = []
        self.slots = plan_slots(models, config.runtime.colocation)
        memory = config.runtime.device_memory
        capacity = None if memory is None else int(memory * 2**30)
        self.residency = Residency(self.slots, models, capacity, self.deadlines)
        self.nodes: list[Node] = []
        self.driver_node = 0  # index in `nodes`
        self.placements: dict[str, list[ProcessPlacement]] = {}  # by model, then rank

    # ---- for flows ------------------------------------------------------------------------------------------------

    def spawn(self, name: str, config: ModelConfig, context: Context) -> DistModel:
        """Start a model; several models load at the same time (``model.ready`` is a Future).

        Raises ValueError if the name is taken, or if the model needs devices and was not in the configuration.
        """
        if name in self.models:
            raise ValueError(f"there is a model '{name}' already")
        if name not in self.slots:
            self._add_slot(name, find_footprint(name, config))
        slot, module = self.slots[name], find_module_class(config)
        spmd = module.one_group(config)
        actors = self._start(name, slot, context.threads, spmd, module.exclusive)
        if module.exclusive:
            self.residency.add(name, slot, [rank for actor in actors for rank in actor.ranks])
        model = self.models[name] = DistModel(name, config, actors, self, spmd)
        model.ready = model.setup(context)
        return model

    def expect_functions(self) -> None:
        """Start the worker of pure functions now, not at its first call."""
        self._function_worker()

    def put(self, batch: Batch) -> BatchRef:
        """Store a batch of this process, so that workers can read it."""
        return BatchRef.of(Meta.of(batch), self.store.put(batch), self.store)

    def apply(self, function: Callable[..., Any], *inputs: BatchRef | Batch | Future, **keywords: Any) -> Future:
        """Call a pure function on the merged columns of the inputs, in a CPU worker.

        The result is a BatchRef with the function's columns added; the inputs are not stored again. Rows whose status
        is ERROR are left out.
        """

        def work(future: Future) -> Outcome:
            batch, dropped = BatchRef.join(self._resolve_batches("apply", future, inputs)).without_errors()
            outcome = self._call_functions(future, "apply", function, batch.worker_rows, keywords)
            added = [outcome.result] if isinstance(outcome.result, BatchRef) else []  # no columns: statistics alone
            return replace(outcome, result=BatchRef.join([batch, *added]), stats=dropped | outcome.stats)

        return self.launch(Call(None, name_of(function)), work, inputs=inputs)

    def join(self, *inputs: BatchRef | Batch | Future) -> Future:
        """Combine the columns of batches of the same sequences into one BatchRef; nothing is computed or stored.

        Rows whose status is ERROR are left out.
        """

        def work(future: Future) -> Outcome:
            return Outcome(*BatchRef.join(self._resolve_batches("join", future, inputs)).without_errors())

        return self.launch(Call(None, "join"), work, inputs=inputs)

    def transform(self, function: Callable[..., Any], *inputs: BatchRef | Batch | Future, **keywords: Any) -> Future:
        """Call a pure function that makes a new batch (other rows, other tokens) of complete batches, in a CPU worker.

        The function returns the batch, or the batch and metrics. The result is a BatchRef.
        """

        def work(future: Future) -> Outcome:
            rows = [ref.worker_rows for ref in self._resolve_batches("transform", future, inputs)]
            return self._call_functions(future, "transform", function, rows, keywords)

        return self.launch(Call(None, name_of(function)), work, inputs=inputs)

    def shutdown(self) -> None:
        """End every call and every worker. Safe to call twice."""
        models = self.models.values()
        for model in models:
            if model.slices is not None:
                model.slices.close()
        closing = [] if self.error else [task.meta for model in models for task in model.release()]
        self._cancel(RuntimeError("the cluster has been shut down"))
        concurrent.futures.wait(closing, CLOSE_SECONDS)
        self._kill()
        for queue in self._queues:
            queue.close()
        deadline = time.monotonic() + CLOSE_SECONDS  # one deadline for all queues: several may hang
        for queue in self._queues:
            queue.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- for models and hooks -------------------------------------------------------------------------------------

    def launch(
        self,
        call: Call,
        work: Callable[[Future], Outcome],
        queue: CallQueue | None = None,
        fatal: bool = True,
        inputs: Iterable[Any] = (),
        recover: Callable[[WorkerLost], None] | None = None,
    ) -> Future:
        """Run ``work(future)`` in the thread of ``queue`` (None: in a new thread); returns its Future.

        An error of a ``fatal`` call ends the run. In `any_order` the call is queued only when the Futures among its
        ``inputs`` have ended. A call that loses a process is made again after ``recover(lost)``, unless that raises.
        """
        future = Future(call)
        with self._lock:
            self._pending.add(future)
        if self.error and self._refuses_calls:
            future.fail(self.error)
        if self.on_call:
            self.on_call(future)
        waits_for = [value for value in inputs if isinstance(value, Future)]
        self._schedule(future, partial(self._complete, future, work, fatal, recover), queue, waits_for, fatal)
        return future

    def _schedule(
        self, future: Future, task: Callable[[], None], queue: CallQueue | None, inputs: list[Future], fatal: bool
    ) -> None:
        """Run the ``task`` of a call in the thread that it needs, when its turn comes."""
        if queue is None:
            start_thread(task, "coalign-task")
        elif self.in_order:
            queue.submit(task)
        else:
            self._run_after(inputs, future, partial(queue.submit, task), fatal)

    def _run_after(self, inputs: list[Future], future: Future, run: Callable[[], None], fatal: bool) -> None:
        """Call ``run`` once all inputs have ended. If one has failed, so does the call, whatever its model does."""

        def advance(_: object = None) -> None:
            for value in inputs:
                if not value.done():
                    return value.ended.add_done_callback(advance)
                if value.ended.exception() is not None:
                    return self._complete(future, lambda _, failed=value: failed.ended.result(), fatal, None)
            run()

        advance()

    @contextmanager
    def watch(self) -> Iterator[WatchedCalls]:
        """Collect the calls that are made inside the block (on this thread; blocks do not nest)."""
        calls = WatchedCalls()
        self.on_call = calls.futures.append
        try:
            yield calls
        finally:
            self.on_call = None

    @contextmanager
    def any_order(self) -> Iterator[None]:
        """Let scorers and policies run the calls made in this block as their inputs arrive, not in the order made.

        For flows that wait for samples while other flows, or a training step, need the same models.
        """
        self.in_order = False
        try:
            yield
        finally:
            self.in_order = True

    @contextmanager
    def defer_errors(self) -> Iterator[BaseException | None]:
        """Let the error of a call end other calls only after this block, so that a training step completes.

        Calls that need the result of the failed one still fail at once. Yields the error that came before, if any.
        """
        self._defers_errors = True
        try:
            yield self.error
        finally:
            self._defers_errors = False
            if self.error:
                self._cancel(self.error)

    def count_restart(self, lost: WorkerLost) -> None:
        """Count a lost process that is to be started again. Raises ``lost`` after too many, or if the run ends."""
        with self._lock:
            if self.error or self._restarts >= self._max_restarts:
                raise lost
            self._restarts += 1
        log.warning(
            "%s is lost (%s); it is started again, %d of %d times (runtime.restarts)",
            lost.worker,
            lost.failure.message.partition("\n")[0],
            self._restarts,
            self._max_restarts,
        )

    def take_restarts(self) -> int:
        """Return how many processes have been started again since the last time."""
        with self._lock:
            new, self._reported_restarts = self._restarts - self._reported_restarts, self._restarts
        return new

    def accept_calls(self) -> None:
        """Accept calls again after an error. Workers finish their earlier calls first."""
        self._refuses_calls = False

    def end_calls(self, error: BaseException) -> None:
        """End all calls with this error, or with the first one of the run, and wait until no thread works on them."""
        self._cancel(error)
        for model in self.models.values():
            model.stop_slices()
        concurrent.futures.wait([cast(Any, future.ended) for future in self.list_pending_calls()])
        while self.list_pending_calls():
            time.sleep(POLL_SECONDS)

    def replace_lost(self, lost: WorkerLost) -> set[str]:
        """Start lost processes again after ``end_calls``; return the models that have new ones. Calls are accepted.

        Lost processes are those that ``lost`` names, those on lost nodes, and those that do not answer within
        PING_SECONDS. Raises ``lost`` if `runtime.restarts` does not allow for them.
        """
        stranded = self._find_stranded()
        silent = stranded | self._find_silent([*lost.workers, *stranded])
        self.error, self._refuses_calls = None, False
        if lost.workers:
            self.count_restart(lost)
        for worker in sorted(silent.difference(lost.workers)):
            why = "its node is lost" if worker in stranded else f"no answer within {PING_SECONDS:g} s"
            failure = WorkerFailure("worker lost", why, "")
            self.count_restart(WorkerLost(lost.call, [worker], failure))
        gone = silent.union(lost.workers)
        return {name for name, model in self.models.items() if model.restart(gone)}

    def resize(self, name: str, processes: int) -> int:
        """Give a model another number of processes, and return how many it has then.

        It waits for the call of the model that is under way. Replicas for which no devices are free are not started:
        they wait for them (``has_place``). A model whose processes compute together has no training state after that,
        and replicas that generate have no weights. ValueError if the model cannot have so many, or processes that
        compute together find too few devices.
        """
        model, slot = self.models[name], self.slots[name]
        if len(slot.positions) > 1 or slot.name in self.residency.slots:
            raise ValueError(f"models.{name} shares its devices with other models, or leaves them: it cannot be scaled")
        if processes < 1:
            raise ValueError(f"models.{name} needs a process at least, and {processes} were asked for")
        current = slot.footprints[name]
        _, needs = self._resize_config(name, processes)
        added = self._add_processes(model, needs, processes - current.processes)
        processes = min(processes, current.processes + len(added))
        if processes == current.processes and not model.spmd:
            return processes
        config, needs = self._resize_config(name, processes)
        try:
            leaving = model.resize(config, added)
        except Exception:
            for rank in added:
                self.end_worker(rank)
            raise
        self._note_size(name, needs)
        for rank in leaving:
            self._wait_and_end(rank)
        return processes

    def has_place(self, name: str) -> bool:
        """Return whether a missing replica can be started: its devices are free, or none were requested yet."""
        return False

    def drop(self, rank: WorkerHandle, name: str, processes: int) -> ModelConfig:
        """Remove a lost replica for which no device is free; return the model's configuration with ``processes``."""
        config, needs = self._resize_config(name, processes)
        self.end_worker(rank)
        self._note_size(name, needs)
        return config

    def _resize_config(self, name: str, processes: int) -> tuple[ModelConfig, Footprint]:
        """The configuration of a model with another number of processes, and its footprint. ValueError."""
        model, current = self.models[name], self.slots[name].footprints[name]
        numbers = {"num_process": processes, "num_gpu": processes * current.devices}
        config = type(model.config).model_validate(model.config.model_dump() | numbers)
        return config, find_footprint(name, config)

    def _note_size(self, name: str, needs: Footprint) -> None:
        [self.slots[name]] = list_slots(pack_slots({name: needs}, []))

    def find_rendezvous(self, ranks: Sequence[WorkerHandle]) -> str | None:
        """Return an address where the ranks of a model can meet; None for a single one."""
        return None

    def list_pending_calls(self) -> list[Future]:
        """The calls that have not ended, oldest first."""
        with self._lock:
            return sorted(self._pending, key=lambda future: future.created_at)

    def stacks(self) -> dict[str, str]:
        """The Python stacks of every process of the run, by process name (`driver`, `policy, replica 0`)."""
        from coalign.cluster.stacks import format_own_stacks  # for a run that hangs

        return {"driver": format_own_stacks()}

    def model_queue(self, name: str, config: ModelConfig, ranks: Sequence[WorkerHandle]) -> CallQueue:
        """Return the queue whose thread does the work of a model's calls."""
        return self.call_queue(name)

    def choose_executor(self, model: DistModel[Any]) -> Executor:
        """Choose how a model's calls are done; called again when its processes have changed."""
        return choose_executor(model)

    def call_queue(self, name: str) -> CallQueue:
        """Start a call queue that ends with this cluster."""
        self._queues.append(CallQueue(name))
        return self._queues[-1]

    def resolve(self, value: Any) -> Any:
        """An argument as workers take it: the result of a Future (waits), the reference of a Batch, else unchanged."""
        value = value.result() if isinstance(value, Future) else value
        return self.put(value) if isinstance(value, Batch) else value

    @contextmanager
    def hold_devices(
        self, name: str, future: Future, method: str, needs: Mapping[str, Sequence[str]]
    ) -> Iterator[None]:
        """Reserve a model's devices for one call, and move the components that the call ``needs`` there, by model.

        The devices of other models in ``needs`` are reserved, too.
        """
        slots = {self.slots[model].name: self.slots[model] for model in (name, *needs)}
        with ExitStack() as stack:
            for _, slot in sorted(slots.items()):
                stack.enter_context(self._hold(slot, *({name, *needs} & slot.positions.keys())))
            self.residency.prepare(future, name, method, needs)
            try:
                yield
            finally:
                self.residency.release(name)

    # ---- for subclasses -------------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        """Start the workers of a model at its positions in the slot."""

    @abstractmethod
    def _function_worker(self) -> WorkerHandle:
        """The worker of pure functions, which has no module."""

    @abstractmethod
    def end_worker(self, rank: WorkerHandle) -> None:
        """End a worker that nobody calls any more."""

    @abstractmethod
    def _add_processes(self, model: DistModel[Any], needs: Footprint, count: int) -> list[WorkerHandle]:
        """Start ``count`` more processes of a model (below 1: none), which will have the footprint ``needs``.

        Replicas may be fewer, where devices are missing.
        """

    @abstractmethod
    def _replace_function_worker(self, worker: WorkerHandle, lost: WorkerLost) -> None:
        """Start the worker of pure functions again, unless another thread has. Raises ``lost`` if it cannot."""

    @abstractmethod
    def _kill(self) -> None:
        """End all workers, whatever they are doing."""

    def _hold(self, slot: Slot, *models: str) -> AbstractContextManager[None]:
        """Reserve the positions of models in a slot for one call."""
        return slot.hold(*models)

    def _add_slot(self, name: str, needs: Footprint) -> None:
        """Place the processes of a model that the configuration does not have."""
        if needs.devices:
            raise ValueError(f"models.{name} needs {needs.total} devices, and none were reserved for it at the start")
        busy = Counter(placement.node for ranks in self.placements.values() for placement in ranks)
        nodes = [replace(node, processes=busy[number]) for number, node in enumerate(self.nodes)]
        [self.slots[name]] = added = list_slots(pack_slots({name: needs}, []))
        self.placements |= place_processes(added, assign_nodes(added, nodes), [])

    # ---- private --------------------------------------------------------------------------------------------------

    def _wait_and_end(self, rank: WorkerHandle) -> None:
        """End a worker once it has answered the calls that it has."""
        with suppress(WorkerLost):
            call = Call(None, "ping")
            wait(Future(call), [rank.execute("ping")], self.deadlines)
        self.end_worker(rank)

    def _resolve_batches(self, verb: str, future: Future, inputs: Sequence[Any]) -> list[BatchRef]:
        """Wait for the inputs of a function. TypeError for what is no batch."""
        refs = [self.resolve(value) for value in inputs]
        for ref in refs:
            if not isinstance(ref, BatchRef):
                raise TypeError(f"{verb}({future.call}, ...): expected batches, got a {type(ref).__name__}")
        return refs

    def _call_functions(self, future: Future, verb: str, *arguments: Any) -> Outcome:
        """Run a verb of the worker of pure functions; in a new one if it is lost, since functions change nothing."""
        losses = 0
        while True:
            worker = self._function_worker()
            tasks = [worker.execute(verb, *arguments)]
            try:
                return merge_answers(tasks, wait(future, tasks, self.deadlines), self.store)
            except WorkerLost as lost:
                losses += 1
                if losses == MAX_LOSSES:
                    raise
                self._replace_function_worker(worker, lost)

    def _complete(
        self,
        future: Future,
        work: Callable[[Future], Outcome],
        fatal: bool,
        recover: Callable[[WorkerLost], None] | None,
    ) -> None:
        """Run the work of a call, and settle its Future."""
        losses = 0
        while not future.done():
            try:
                try:
                    outcome = work(future)
                except WorkerLost as lost:
                    losses += 1
                    if recover is None or losses == MAX_LOSSES:
                        raise
                    recover(lost)
                    continue
                if self.on_end:
                    self.on_end(future, outcome)
                future.succeed(outcome)
            except BaseException as error:
                if future.fail(error) and fatal:
                    self._cancel(error)
        with self._lock:
            self._pending.discard(future)

    def _find_stranded(self) -> set[str]:
        """Return the names of the workers whose node is lost: some of them may live on for a second."""
        return set()

    def _find_silent(self, lost: Sequence[str]) -> set[str]:
        """Return the names of the workers, beside ``lost`` ones, that have ended or do not answer in time."""
        pings = [task for model in self.models.values() for task in model.ping(lost)]
        concurrent.futures.wait([task.meta for task in pings], PING_SECONDS)
        return {task.worker for task in pings if not task.meta.done() or task.meta.exception() is not None}

    def _cancel(self, error: BaseException) -> None:
        """End every call with the first error of the run: this one, unless there was one before."""
        with self._lock:
            self.error = self.error or error
            if self._defers_errors:
                return
            self._refuses_calls = True
            pending = list(self._pending)
        for future in pending:
            future.fail(self.error)
