"""The cluster that is this process: one worker and one thread for each model, no Ray, nothing copied."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from coalign.cluster.answers import Running, WorkerHandle
from coalign.cluster.base import Cluster
from coalign.cluster.dist import DistActor
from coalign.cluster.future import Task
from coalign.cluster.placement.devices import accelerator
from coalign.cluster.placement.nodes import Node, assign, seats
from coalign.cluster.placement.slots import Slot, distinct
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.memory.arena import Arena


class Cell:
    """A reference within this process."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value


class LocalStore:
    """Payloads as live objects of this process."""

    in_process = True

    def put(self, value: Any) -> Cell:
        return Cell(value)

    def get(self, ref: Cell) -> Any:
        return ref.value

    def rows(self, ref: Cell, rows: np.ndarray) -> Batch:
        return ref.value.select(rows)


class LocalWorker:
    """A worker of this process whose verbs run on the thread that ``submit`` gives them to."""

    def __init__(self, where: str, worker: Worker, submit: Callable[[Task], None]) -> None:
        self.where, self._worker, self._submit = where, worker, submit

    def execute(self, verb: str, *arguments: Any) -> Running:
        [running] = self.in_parts([(verb, *arguments)])
        return running

    def in_parts(self, verbs: Sequence[tuple[Any, ...]]) -> list[Running]:
        all_running = [Running(self.where, concurrent.futures.Future(), Cell()) for _ in verbs]

        def task() -> None:
            for verb, running in zip(verbs, all_running, strict=True):
                answer, running.payload.value = self._worker.execute(*verb)
                running.meta.set_result(answer)

        self._submit(task)
        return all_running


class LocalCluster(Cluster):
    """All models in this process.

    Models that compute on the CPU share one thread, functions included: they would only fight over the same cores, and
    as soon as two threads compute, libgomp counts more threads than cores and puts them to sleep after every operation
    (measured: generation takes 1.4 times as long). Models on GPUs, and those that mostly wait for something else
    (``exclusive = False``, as rewards), have a thread each.
    """

    store = LocalStore()

    def __init__(self, config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> None:
        super().__init__(config, models)
        self._cpu = self.call_queue("cpu")
        self._arenas: dict[str, Arena] = {}  # by device: models that share tensors have to agree about them
        self._threads = config.runtime.threads
        self._device = accelerator(config.runtime.accelerator).device
        count = 0 if self._device == "cpu" else getattr(torch, self._device).device_count()
        self.nodes = [Node("this process", count, count)]
        where = assign(distinct(self.slots), self.nodes)
        self.seats = seats(distinct(self.slots), where, [[[str(number) for number in range(count)]]])

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        processes = slot.footprints[name].processes
        if processes > 1:
            raise ValueError(f"models.{name} asks for {processes} processes; use `runtime.cluster: ray`")
        devices = self.seats[name][0].devices
        calls = self.call_queue(f"{name}-worker") if devices or not exclusive else self._cpu
        device = f"{self._device}:{devices[0]}" if devices else "cpu"
        arena = None
        if self.residency.slots and exclusive:
            limit = self.residency.capacity if slot.name in self.residency.slots else None
            arena = self._arenas.setdefault(device, Arena(device, limit))
        return [DistActor([LocalWorker(name, Worker(self.store, threads, arena), calls.submit)], device)]

    def _hold(self, slot: Slot, *models: str) -> AbstractContextManager[None]:
        in_order = not slot.devices and slot.name not in self.residency.slots  # on one thread as it is
        return nullcontext() if in_order else super()._hold(slot, *models)

    def _helper(self) -> WorkerHandle:
        return LocalWorker("this process", Worker(self.store, self._threads), self._cpu.submit)

    def _kill(self) -> None:
        """Threads cannot be killed: they end when idle, or with the process."""
