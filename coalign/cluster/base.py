"""What every cluster has in common: models by name, calls under way, and the one place where the first error counts."""

from __future__ import annotations

import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from coalign.cluster import stacks
from coalign.cluster.answers import WorkerHandle, combine, wait
from coalign.cluster.dist import DistActor, DistModel
from coalign.cluster.functions import name_of
from coalign.cluster.future import BatchRef, Call, CallQueue, Future, Meta, Outcome, Store, Task, start_thread
from coalign.cluster.placement.nodes import Node, ProcessPlacement, assign, seats
from coalign.cluster.placement.slots import Footprint, Slot, distinct, plan
from coalign.cluster.residency import Residency
from coalign.cluster.worker import module_class
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import PARALLEL, ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.roles import Context

CLOSE_SECONDS = 5.0  # how long modules may take to give back what they hold


class Cluster(ABC):
    """Processes and devices of one run; a context manager that leaves nothing behind.

    The first error of any call ends every other call with the same error and takes the workers down; only ``save``,
    ``save_hf`` and weight updates may fail alone. ``on_call``, if set, is called with each new Future on the thread
    that makes it, ``on_end`` with each one's outcome, just before others see it.
    """

    store: Store

    def __init__(self, config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> None:
        """``models`` are those that will run (None: all of the configuration)."""
        self.timeout = config.runtime.call_timeout
        self.models: dict[str, DistModel] = {}
        self.on_call: Callable[[Future], None] | None = None
        self.on_end: Callable[[Future, Outcome], None] | None = None
        self.error: BaseException | None = None
        self._pending: set[Future] = set()
        self._lock = threading.Lock()
        self._queues: list[CallQueue] = []
        self.slots = planned(config.models if models is None else models, config.runtime.colocation)
        memory = config.runtime.device_memory
        capacity = None if memory is None else int(memory * 2**30)
        self.residency = Residency(self.slots, config.models if models is None else models, capacity, self.timeout)
        self.nodes: list[Node] = []
        self.seats: dict[str, list[ProcessPlacement]] = {}  # of each model's processes, by rank

    # ---- what a run does ------------------------------------------------------------------------------------------

    def spawn(self, name: str, config: ModelConfig, context: Context) -> DistModel:
        """Start a model; it loads while others do (``model.ready``, a Future).

        Raises ValueError if the name is taken, or for a model that nobody announced and that needs devices.
        """
        if name in self.models:
            raise ValueError(f"there is a model '{name}' already")
        if name not in self.slots:
            self._make_room(name, footprint(name, config))
        slot = self.slots[name]
        spmd = module_class(config).one_group(config)
        exclusive = module_class(config).exclusive
        actors = self._start(name, slot, context.threads, spmd, exclusive)
        hold = partial(self._turn, name) if exclusive else _at_once
        if exclusive:
            self.residency.add(name, slot, [rank for actor in actors for rank in actor.ranks])
        model = self.models[name] = DistModel(name, config, actors, self, hold, spmd)
        model.ready = model.setup(context)
        return model

    def expect_functions(self) -> None:
        """Have the worker of pure functions start beside the models, not at its first call."""
        self._helper()

    def put(self, batch: Batch) -> BatchRef:
        """Make a batch of this process known to the workers."""
        return BatchRef.of(Meta.of(batch), self.store.put(batch), self.store)

    def apply(self, function: Callable[..., Any], *inputs: BatchRef | Batch | Future, **keywords: Any) -> Future:
        """A pure function on the merged columns of the inputs, in a CPU worker: a BatchRef with its columns added. Rows
        whose status is ERROR are left out. What the inputs hold is not stored again."""

        def work(future: Future) -> Outcome:
            given, dropped = BatchRef.join(self._batches("apply", future, inputs)).without_errors()
            outcome = self._compute(future, "apply", function, given.share, keywords)
            added = [outcome.result] if isinstance(outcome.result, BatchRef) else []  # no columns: statistics alone
            return replace(outcome, result=BatchRef.join([given, *added]), stats=dropped | outcome.stats)

        return self.launch(Call(None, name_of(function)), work, start_thread)

    def join(self, *inputs: BatchRef | Batch | Future) -> Future:
        """The columns of several batches of the same sequences as one BatchRef, without the rows whose status is ERROR.
        Nothing is computed or stored."""

        def work(future: Future) -> Outcome:
            return Outcome(*BatchRef.join(self._batches("join", future, inputs)).without_errors())

        return self.launch(Call(None, "join"), work, start_thread)

    def transform(self, function: Callable[..., Any], *inputs: BatchRef | Batch | Future, **keywords: Any) -> Future:
        """A pure function from whole batches to another one (other rows, other tokens), in a CPU worker: a BatchRef.

        It returns the batch, or the batch and metrics.
        """

        def work(future: Future) -> Outcome:
            shares = [ref.share for ref in self._batches("transform", future, inputs)]
            return self._compute(future, "transform", function, shares, keywords)

        return self.launch(Call(None, name_of(function)), work, start_thread)

    def shutdown(self) -> None:
        """End every call and every worker. Safe to call twice."""
        models = self.models.values()
        releasing = [] if self.error else [running.meta for model in models for running in model.release()]
        self._cancel(RuntimeError("the cluster has been shut down"))
        concurrent.futures.wait(releasing, CLOSE_SECONDS)
        self._kill()
        for queue in self._queues:
            queue.close()
        for queue in self._queues:
            queue.join(CLOSE_SECONDS)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- what models use ------------------------------------------------------------------------------------------

    def launch(
        self, call: Call, work: Callable[[Future], Outcome], submit: Callable[[Task], None], fatal: bool = True
    ) -> Future:
        """A Future for ``work(future)``, done by the thread that ``submit`` gives it to."""
        future = Future(call)
        with self._lock:
            self._pending.add(future)
            error = self.error
        if error:
            future.fail(error)
        if self.on_call:
            self.on_call(future)
        submit(lambda: self._finish(future, work, fatal))
        return future

    def under_way(self) -> list[Future]:
        """The calls that have not ended, oldest first."""
        with self._lock:
            return sorted(self._pending, key=lambda future: future.made)

    def stacks(self) -> dict[str, str]:
        """The Python stacks of every process of the run, by what it is called (`driver`, `policy, replica 0`)."""
        return {"driver": stacks.own()}

    def call_queue(self, name: str) -> CallQueue:
        """A thread of this cluster, ended with it."""
        self._queues.append(CallQueue(name))
        return self._queues[-1]

    def resolve(self, value: Any) -> Any:
        """An argument of a call once it is there: Futures waited for, Batches put, everything else as it is."""
        value = value.result() if isinstance(value, Future) else value
        return self.put(value) if isinstance(value, Batch) else value

    # ---- what a kind of cluster provides --------------------------------------------------------------------------

    @abstractmethod
    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        """Workers for a model at its places."""

    @abstractmethod
    def _helper(self) -> WorkerHandle:
        """A worker without a module, for pure functions."""

    @abstractmethod
    def _kill(self) -> None:
        """End all workers, whatever they are doing."""

    def _hold(self, slot: Slot, *models: str) -> AbstractContextManager[None]:
        """How a call has the devices of models of a slot to itself."""
        return slot.hold(*models)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _batches(self, verb: str, future: Future, inputs: Sequence[Any]) -> list[BatchRef]:
        """The inputs of a function, once they are there. TypeError for what is no batch."""
        refs = [self.resolve(value) for value in inputs]
        for ref in refs:
            if not isinstance(ref, BatchRef):
                raise TypeError(f"{verb}({future.call}, ...): expected batches, got a {type(ref).__name__}")
        return refs

    def _compute(self, future: Future, verb: str, *arguments: Any) -> Outcome:
        """A verb of the worker of pure functions."""
        running = [self._helper().execute(verb, *arguments)]
        return combine(running, wait(future, running, self.timeout), self.store)

    @contextmanager
    def _turn(self, name: str, future: Future, method: str, needs: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Have the places of a model, and of the others of which a call ``needs`` parts, and these parts there."""
        slots = {self.slots[each].name: self.slots[each] for each in (name, *needs)}
        with ExitStack() as stack:
            for _, slot in sorted(slots.items()):
                stack.enter_context(self._hold(slot, *({name, *needs} & slot.places.keys())))
            self.residency.prepare(future, name, method, needs)
            try:
                yield
            finally:
                self.residency.done(name)

    def _make_room(self, name: str, needs: Footprint) -> None:
        """Seats for processes that the cluster was not started for."""
        if needs.devices:
            raise ValueError(f"models.{name} needs {needs.total} devices, and none were reserved for it at the start")
        busy = Counter(seat.node for ranks in self.seats.values() for seat in ranks)
        nodes = [replace(node, processes=busy[number]) for number, node in enumerate(self.nodes)]
        [self.slots[name]] = added = distinct(plan({name: needs}, []))
        self.seats |= seats(added, assign(added, nodes), [])

    def _finish(self, future: Future, work: Callable[[Future], Outcome], fatal: bool) -> None:
        if not future.done():
            try:
                outcome = work(future)
                if self.on_end:
                    self.on_end(future, outcome)
                future.succeed(outcome)
            except BaseException as error:
                future.fail(error)
                if fatal and self._cancel(error):
                    self._kill()
        with self._lock:
            self._pending.discard(future)

    def _cancel(self, error: BaseException) -> bool:
        """End every call with ``error`` unless something else came first; whether it was the first."""
        with self._lock:
            if self.error:
                return False
            self.error = error
            pending = list(self._pending)
        for future in pending:
            future.fail(error)
        return True


@contextmanager
def _at_once(future: Future, method: str, needs: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """The turn of a model that has to wait for nobody."""
    yield


def planned(models: Mapping[str, ModelConfig], colocation: Sequence[Sequence[str]]) -> dict[str, Slot]:
    """The slot of each model. Raises what Footprint.of and slot.plan raise."""
    return plan({name: footprint(name, model) for name, model in models.items()}, colocation)


def footprint(name: str, config: ModelConfig) -> Footprint:
    """Processes and devices of a model. ConfigError for a module that cannot be cut as its settings say."""
    for key in PARALLEL:
        if (ways := getattr(config, key)) > 1 and key not in module_class(config).parallel:
            inherited = f" (`like: {config.like}` takes it over)" if config.like else ""
            message = f"is {ways}, and the module `{config.module}` is not cut that way; set it to 1{inherited}"
            raise ConfigError([ConfigProblem(("models", name, key), message)])
    return Footprint.of(name, config, module_class(config).one_group(config))
