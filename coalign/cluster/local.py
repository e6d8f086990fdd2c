"""The cluster of a run in one process: a thread for each model, no Ray, nothing copied."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from coalign.cluster.cluster import Cluster
from coalign.cluster.dist import DistActor, DistModel
from coalign.cluster.future import Meta, WorkerHandle, WorkerLost, WorkerTask
from coalign.cluster.placement.nodes import Node, ProcessPlacement, assign_nodes, find_accelerator, place_processes
from coalign.cluster.placement.slots import Footprint, Slot, list_slots
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.devices import count_devices
from coalign.memory import Arena
from coalign.threads import CallQueue


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


class LocalWorker:
    """A worker of this process whose verbs run on the thread of ``calls``."""

    def __init__(self, name: str, worker: Worker, calls: CallQueue) -> None:
        self.name, self._worker, self._calls = name, worker, calls

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        task = WorkerTask(self.name, concurrent.futures.Future(), LocalReference())
        self._calls.submit(partial(self._worker.execute, verb, *arguments), partial(_answer, task))
        return task

    def execute_all(self, verbs: Sequence[tuple[Any, ...]]) -> list[WorkerTask]:
        tasks = [WorkerTask(self.name, concurrent.futures.Future(), LocalReference()) for _ in verbs]

        def work() -> None:  # one task of the thread: nothing comes in between
            for task, verb in zip(tasks, verbs, strict=True):
                _answer(task, self._worker.execute(*verb))

        self._calls.submit(work)
        return tasks

    def replace(self) -> LocalWorker:
        raise RuntimeError(f"{self.name} is a thread of this process, which cannot be ended and started again")


def _answer(task: WorkerTask, result: tuple[Meta, Batch | None]) -> None:
    meta, task.payload.value = result
    task.meta.set_result(meta)


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
        self._cpu = self.call_queue("cpu")
        self._arenas: dict[str, Arena] = {}  # by device: models on one device share one
        self._threads = config.runtime.threads
        self._device = find_accelerator(config.runtime.accelerator).device
        self.nodes, self.placements = self._place()

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
        calls = self.call_queue(f"{name}-worker") if devices or not exclusive else self._cpu
        device = f"{self._device}:{devices[0]}" if devices else "cpu"
        arena = None
        if self.residency.slots and exclusive:
            limit = self.residency.capacity if slot.name in self.residency.slots else None
            arena = self._arenas.setdefault(device, Arena(device, limit))
        return [DistActor([LocalWorker(name, Worker(self.store, threads, arena), calls)], device)]

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
        """Do nothing: threads cannot be killed; they end when idle, or with the process."""
