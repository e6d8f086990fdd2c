"""The cluster of a run in one process: one thread computes, no Ray, nothing copied.

A call whose inputs have ended is done on the thread of its worker from beginning to end: nobody waits for an answer.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np

from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.batch_shards import check_same_rows, reorder, shard_rows
from coalign.cluster.cluster import Cluster
from coalign.cluster.dist import DistActor, DistModel
from coalign.cluster.executor import Executor, ModelCall
from coalign.cluster.future import Future, Outcome, WorkerHandle, WorkerLost, WorkerTask, merge_answers, wait
from coalign.cluster.placement.nodes import Node, ProcessPlacement, assign_nodes, find_accelerator, place_processes
from coalign.cluster.placement.slots import Footprint, Slot, list_slots
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.devices import count_devices
from coalign.memory import Arena
from coalign.threads import CallQueue, start_thread

LOOK_SECONDS = 0.5  # between two looks whether a call has missed its deadline


class LocalReference:
    """A reference to a live object of this process."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value


class LocalStore:
    """Keeps payloads as live objects of this process."""

    in_process = True

    def put(self, value: Any) -> LocalReference:
        return LocalReference(value)

    def get(self, ref: LocalReference) -> Any:
        return ref.value

    def rows(self, ref: LocalReference, rows: np.ndarray) -> Batch:
        return ref.value.select(rows)


class _ComputeThread(CallQueue):
    """A thread that computes for workers. ``call`` is the call whose work it does, None if it serves another thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.call: Future | None = None

    def submit_call(self, future: Future, task: Callable[[], None]) -> None:
        """Run the ``task`` of a call after all earlier ones."""

        def work() -> None:
            self.call = future
            try:
                task()
            finally:
                self.call = None

        self.submit(work)


class _CallLine:
    """The calls of one model, which its thread does in their order, each once its inputs have ended."""

    def __init__(self, thread: _ComputeThread) -> None:
        self._thread = thread
        self._waiting: deque[tuple[Future, Callable[[], None], list[Future]]] = deque()
        self._lock = threading.Lock()

    def add(self, future: Future, task: Callable[[], None], inputs: list[Future]) -> None:
        with self._lock:
            self._waiting.append((future, task, inputs))
        for value in inputs:
            value.ended.add_done_callback(lambda _: self._advance())
        self._advance()

    def _advance(self) -> None:
        with self._lock:
            while self._waiting and all(value.done() for value in self._waiting[0][2]):
                future, task, _ = self._waiting.popleft()
                self._thread.submit_call(future, task)


class LocalWorker:
    """A worker of this process whose verbs run on a ``thread``: at once for the work of a call that runs there."""

    def __init__(self, name: str, worker: Worker, thread: _ComputeThread) -> None:
        self.name, self._worker, self.thread = name, worker, thread

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        task = WorkerTask(self.name, concurrent.futures.Future(), LocalReference())
        if self.thread.is_current:
            if self.thread.call is not None:
                self.thread.call.running = [task]
            _answer(task, self._worker.execute(verb, *arguments))
        else:
            self.thread.submit(partial(self._worker.execute, verb, *arguments), partial(_answer, task))
        return task

    def replace(self) -> LocalWorker:
        raise RuntimeError(f"{self.name} is a thread of this process, which cannot be ended and started again")


def _answer(task: WorkerTask, result: tuple[Meta, Batch | None]) -> None:
    meta, task.payload.value = result
    task.meta.set_result(meta)


class InProcess:
    """The model is an object of this process: its thread does a call from beginning to end, and no row is split.

    ``recorded`` does calls whose shards are recorded.
    """

    def __init__(self, model: DistModel[Any], recorded: Executor) -> None:
        self._model, self._recorded = model, recorded
        [self._worker] = model.ranks

    def execute(self, call: ModelCall, future: Future) -> Outcome:
        if call.record is not None:
            return self._recorded.execute(call, future)
        model = self._model
        call = call.resolve(model.cluster.resolve)
        arguments = [*call.arguments]
        check_same_rows(future.call, arguments)
        shards = shard_rows(arguments[0], 1, "work") if call.by == "work" else None  # the longest first
        if shards is not None:
            [arguments[0]] = shards.batches
        rows = tuple([_refer_to_rows(value) for value in arguments])
        named = {name: _refer_to_rows(value) for name, value in call.keywords.items()}
        with model.hold_devices(future, call.method):  # a sync may be reading the weights of a model with a device
            tasks = [self._worker.execute("call", call.method, rows, named)]
            metas = wait(future, tasks, model.cluster.deadlines)
        outcome = merge_answers(tasks, metas, model.store)
        return outcome if shards is None else reorder(outcome, shards.order(metas))


def _refer_to_rows(value: Any) -> Any:
    return value.worker_rows if isinstance(value, BatchRef) else value


class LocalCluster(Cluster):
    """Runs all models in this process.

    Models that compute on the CPU, and pure functions, share one thread. Two threads would only compete for the cores,
    and libgomp puts its threads to sleep after every operation when there are more of them than cores (measured:
    generation takes 1.4 times as long). Models on GPUs, and models that mostly wait for something else
    (``exclusive = False``, such as rewards), have a thread each.
    """

    store = LocalStore()

    def __init__(self, config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> None:
        super().__init__(config, models)
        self._max_restarts = 0  # a thread cannot be ended, so none can take its place
        self._compute_threads: list[_ComputeThread] = []
        self._cpu = self.compute_thread("cpu")
        self._computing: dict[str, _ComputeThread] = {}  # by model: its calls are done on the thread of its worker
        self._lines: dict[str, _CallLine] = {}  # by model: its calls wait for their inputs without holding the thread
        self._streams = any(m.processes * m.shares_per_replica * m.parts_per_call > 1 for m in config.models.values())
        self._closed = threading.Event()
        start_thread(self._watch_deadlines, "coalign-deadlines")
        self._arenas: dict[str, Arena] = {}  # by device: models on one device share one
        self._threads = config.runtime.threads
        self._device = find_accelerator(config.runtime.accelerator).device
        self.nodes, self.placements = self._place()

    def compute_thread(self, name: str) -> _ComputeThread:
        """Start a thread for workers, which ends with this cluster."""
        thread = _ComputeThread(name)
        self._queues.append(thread)
        self._compute_threads.append(thread)
        return thread

    def model_queue(self, name: str, config: ModelConfig, ranks: Sequence[WorkerHandle]) -> CallQueue:
        """A model of one process needs no thread of its own that waits for that process.

        It has one if components of models come and go during its calls, or if its results come in chunks.
        """
        if len(ranks) > 1 or self.slots[name].name in self.residency.slots or config.parts_per_call > 1:
            return super().model_queue(name, config, ranks)
        thread = self._computing[name] = cast(LocalWorker, ranks[0]).thread
        if thread is self._cpu:  # others need it, too
            self._lines[name] = _CallLine(thread)
        return thread

    def choose_executor(self, model: DistModel[Any]) -> Executor:
        executor = super().choose_executor(model)
        has_thread = model.name in self._lines or len(self.slots[model.name].positions) == 1
        is_alone = has_thread and model.name in self._computing and not self._streams
        return InProcess(model, executor) if is_alone and model.config.reduction != "exact" else executor

    def _schedule(
        self, future: Future, task: Callable[[], None], queue: CallQueue | None, inputs: list[Future], fatal: bool
    ) -> None:
        model = future.call.model
        if model is None:  # a function: it changes nothing, so its turn comes with its inputs
            self._run_after(inputs, future, partial(self._cpu.submit_call, future, task), fatal)
        elif queue is None or model not in self._computing:
            super()._schedule(future, task, queue, inputs, fatal)
        elif not self.in_order:
            self._run_after(inputs, future, partial(self._computing[model].submit_call, future, task), fatal)
        elif model in self._lines:
            self._lines[model].add(future, task, inputs)
        else:
            self._computing[model].submit_call(future, task)

    def _watch_deadlines(self) -> None:
        """End the run if a worker does not answer in time: no other thread waits for it."""
        while not self._closed.wait(LOOK_SECONDS):
            for thread in self._compute_threads:
                self._check_deadline(thread.call)

    def _check_deadline(self, call: Future | None) -> None:
        tasks = [] if call is None else call.running  # read once: the call may end meanwhile
        if call is None or not tasks:
            return
        if time.monotonic() - tasks[0].monotonic_start > self.deadlines.find(call.call):
            error = self.deadlines.build_error(call, tasks)
            call.fail(error)
            self._cancel(error)

    def _place(self) -> tuple[list[Node], dict[str, list[ProcessPlacement]]]:
        """The nodes, and the placement of each model's processes. ValueError if there are not enough devices."""
        count = count_devices(self._device)
        nodes, slots = [Node("this process", count, count)], list_slots(self.slots)
        devices = [[[str(number) for number in range(count)]]]
        return nodes, place_processes(slots, assign_nodes(slots, nodes), devices)

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        processes = slot.footprints[name].processes
        if processes > 1:
            raise ValueError(f"models.{name} asks for {processes} processes; use `runtime.cluster: ray`")
        devices = self.placements[name][0].devices
        thread = self.compute_thread(name) if devices or not exclusive else self._cpu
        device = f"{self._device}:{devices[0]}" if devices else "cpu"
        arena = None
        if self.residency.slots and exclusive:
            limit = self.residency.capacity if slot.name in self.residency.slots else None
            arena = self._arenas.setdefault(device, Arena(device, limit))
        return [DistActor([LocalWorker(name, Worker(self.store, threads, arena), thread)], device)]

    def _hold(self, slot: Slot, *models: str) -> AbstractContextManager[None]:
        one_thread = not slot.devices and slot.name not in self.residency.slots  # that thread runs calls in turn
        return nullcontext() if one_thread else super()._hold(slot, *models)

    def _function_worker(self) -> WorkerHandle:
        return LocalWorker("this process", Worker(self.store, self._threads), self._cpu)

    def _replace_function_worker(self, worker: WorkerHandle, lost: WorkerLost) -> None:
        raise lost

    def end_worker(self, rank: WorkerHandle) -> None:
        """Do nothing: it is a thread."""

    def _add_processes(self, model: DistModel[Any], needs: Footprint, count: int) -> list[WorkerHandle]:
        raise ValueError(f"models.{model.name} runs in this process, which has no others; use `runtime.cluster: ray`")

    def _kill(self) -> None:
        """Watch no longer. Threads cannot be killed; they end when idle, or with the process."""
        self._closed.set()
