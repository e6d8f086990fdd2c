"""The cluster that is this process: one worker and one thread for each model, no Ray, nothing copied."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from coalign.cluster.answers import Remote, Running
from coalign.cluster.base import Cluster
from coalign.cluster.dist import DistActor
from coalign.cluster.future import Meta
from coalign.cluster.lane import Task
from coalign.cluster.slot import Slot, require
from coalign.cluster.worker import Worker
from coalign.config.schema import RunConfig
from coalign.data.batch import Batch


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

    def rows(self, ref: Cell, start: int, stop: int) -> Batch:
        return ref.value.slice(start, stop)


class LocalWorker:
    """A worker of this process whose verbs run on the thread that ``submit`` gives them to."""

    def __init__(self, where: str, worker: Worker, submit: Callable[[Task], None]) -> None:
        self._where, self._worker, self._submit = where, worker, submit

    def execute(self, verb: str, *arguments: Any) -> Running:
        meta: concurrent.futures.Future[Meta] = concurrent.futures.Future()
        cell = Cell()

        def task() -> None:
            answer, cell.value = self._worker.execute(verb, *arguments)
            meta.set_result(answer)

        self._submit(task)
        return Running(self._where, meta, cell)


class LocalCluster(Cluster):
    """All models in this process.

    Models that compute on the CPU share one thread, functions included: they would only fight over the same cores, and
    as soon as two threads compute, libgomp counts more threads than cores and puts them to sleep after every operation
    (measured: generation takes 1.4 times as long). Models on GPUs, and those that mostly wait for something else
    (``exclusive = False``, as rewards), have a thread each.
    """

    store = LocalStore()

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._cpu = self.lane("cpu")
        self._threads = config.runtime.threads
        self._gpus = _first_gpus(list(self.slots.values()))
        require(self.slots, [torch.cuda.device_count()])

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        if len(slot.places[name]) > 1:
            raise ValueError(f"models.{name} asks for {len(slot.places[name])} processes; use `runtime.cluster: ray`")
        lane = self._cpu if exclusive and not slot.gpus_of(name) else self.lane(f"{name}-worker")
        device = f"cuda:{self._gpus[slot.name] + slot.places[name][0] * slot.gpus}" if slot.gpus_of(name) else "cpu"
        return [DistActor([LocalWorker(name, Worker(self.store, threads), lane.submit)], device)]

    def _hold(self, name: str, slot: Slot) -> Callable[[], AbstractContextManager[Any]]:
        return super()._hold(name, slot) if slot.gpus_of(name) else nullcontext

    def _helper(self) -> Remote:
        return LocalWorker("this process", Worker(self.store, self._threads), self._cpu.submit)

    def _kill(self) -> None:
        """Threads cannot be killed: they end when idle, or with the process."""


def _first_gpus(slots: list[Slot]) -> dict[str, int]:
    """The first device of each slot, counted through this machine's."""
    first, count = {}, 0
    for slot in slots:
        if slot.name not in first:
            first[slot.name] = count
            count += slot.size * slot.gpus
    return first
