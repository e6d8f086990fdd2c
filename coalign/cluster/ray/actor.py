"""A process of a model on Ray: the actor that runs there, and the handle by which the driver calls it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from coalign.cluster.batch_ref import Meta, WorkerFailure
from coalign.cluster.future import WorkerTask
from coalign.cluster.placement.nodes import ProcessPlacement
from coalign.cluster.ray.connection import find_own_node
from coalign.cluster.ray.space import RayStoreError, StoreSpace
from coalign.cluster.ray.store import NumpyBatch, RayStore, measure_store, to_numpy
from coalign.cluster.stacks import StackFile, listen
from coalign.cluster.survivors.claim import LoadedSources, ProcessState
from coalign.cluster.survivors.takeover import list_groups
from coalign.cluster.worker import Worker
from coalign.memory import Arena
from coalign.threads import begin_in_thread, start_thread

if TYPE_CHECKING:
    from coalign.cluster.ray.ray_cluster import RayCluster

MEASURE_SECONDS = 2.0  # how long a worker waits to hear what its store has free


class Actor:
    """A worker in a process of its own; ``arena``: the device whose memory is managed (None: no device's).

    It obeys the driver of the newest ``epoch``. With ``orphan_seconds`` it ends after so long without a driver.
    """

    def __init__(
        self,
        threads: int | None,
        visible: Mapping[str, str],
        arena: str | None = None,
        epoch: int = 0,
        orphan_seconds: float | None = None,
    ) -> None:
        os.environ.update(visible)  # not before: Ray hides all devices from an actor that asks it for none
        self._stacks = listen()
        self._worker = Worker(RayStore(), threads, Arena(arena) if arena else None)
        self._space: StoreSpace | None = None  # the first measurement
        self._sources = LoadedSources()
        self._sources.note()
        self._epoch, self._heard = epoch, time.monotonic()
        self._calls, self._busy, self._failed, self._is_taken_over = 0, False, False, False
        self._changed: str | None = None  # a source file that had changed when another driver came
        if orphan_seconds is not None:
            start_thread(partial(self._end_as_orphan, orphan_seconds), "coalign-orphan")

    @ray.method(concurrency_group="control")
    def peek(self) -> ProcessState:
        """Describe this process. It answers during other calls, as the methods below do."""
        return self._describe()

    @ray.method(concurrency_group="control")
    def obey(self, epoch: int) -> ProcessState:
        """Refuse the calls of drivers before this ``epoch`` from now on."""
        if epoch > self._epoch:
            self._epoch, self._heard, self._is_taken_over = epoch, time.monotonic(), True
            self._changed = self._sources.find_changed()
        return self._describe()

    @ray.method(concurrency_group="control")
    def hear(self, epoch: int) -> None:
        """Take note that the driver of this ``epoch`` lives."""
        if epoch == self._epoch:
            self._heard = time.monotonic()

    def _describe(self) -> ProcessState:
        silence = time.monotonic() - self._heard
        return ProcessState(self._epoch, silence, self._calls, self._busy, self._failed, self._changed)

    def _end_as_orphan(self, seconds: float) -> None:
        while time.monotonic() - self._heard < seconds:
            time.sleep(min(1.0, seconds / 10))
        with suppress(Exception):  # another process of the run has removed them, or Ray is gone
            for name in list_groups(str(ray.get_runtime_context().get_actor_name()).partition(":")[0]):
                remove_placement_group(get_placement_group(name))
        os._exit(1)

    def stack_file(self) -> tuple[str, StackFile]:
        """The node of this process, and the file where it writes its stacks."""
        return ray.get_runtime_context().get_node_id(), self._stacks

    def address(self) -> str:
        """host:port of this node, with a port that is free now."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as probe:
            return f"{host}:{probe.getsockname()[1]}"

    @ray.method(num_returns=2)
    def execute(self, epoch: int, verb: str, arguments: tuple[Any, ...]) -> tuple[Meta, Any]:
        self._busy = True  # before the epoch is read: who raises it sees either this call or its refusal
        try:
            if epoch < self._epoch:
                message = f"driver {epoch} of this run asks, and the process obeys driver {self._epoch}: end this one"
                return Meta(failure=WorkerFailure("StaleDriver", message, "")), None
            self._calls += 1
            return self._execute(verb, arguments)
        finally:
            self._busy = False

    def _execute(self, verb: str, arguments: tuple[Any, ...]) -> tuple[Meta, Any]:
        if verb == "setup" and self._is_taken_over:
            verb, self._is_taken_over = "set_up_again", False
        meta, payload = self._worker.execute(verb, *arguments)
        self._failed |= meta.failure is not None
        if verb == "setup":
            self._sources.note()
        payload = to_numpy(payload)
        if isinstance(payload, NumpyBatch) and (problem := self._find_lack(payload.nbytes)):
            return Meta(failure=WorkerFailure("RayStoreError", problem, "", RayStoreError(problem))), None
        return meta, payload

    def _measure_space(self) -> StoreSpace | None:
        """Measure this node's store; None if it takes long: the raylet asks all processes, and one may be stopped."""
        asking = begin_in_thread(lambda: measure_store(find_own_node()), "coalign-ray-store")
        try:
            return asking.result(MEASURE_SECONDS)
        except (grpc.RpcError, TimeoutError):
            return None

    def _find_lack(self, payload: int) -> str | None:
        """Describe a store that cannot take ``payload`` bytes: Ray would lose a result without an error.

        Where little can be spilled, so many bytes are stored for a moment: free bytes may be fragmented.
        """
        self._space = self._space or self._measure_space()
        if self._space is None or self._space.can_spill(payload):
            return None
        try:
            RayStore().put(np.empty(payload, np.uint8))
        except RayStoreError as problem:
            return str(problem)
        return None


class RayWorker:
    """A handle to an Actor: process ``number`` of ``model``, at its ``placement``."""

    def __init__(
        self, name: str, actor: Any, model: str, number: int, placement: ProcessPlacement, cluster: RayCluster
    ) -> None:
        self.name, self.actor, self._cluster = name, actor, cluster
        self.model, self.number, self.placement = model, number, placement

    def replace(self) -> RayWorker:
        return self._cluster.replace_process(self)

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        # In a tuple, so that Ray does not fetch the references among them: the worker fetches the rows that it needs.
        meta, payload = self.actor.execute.remote(self._cluster.epoch, verb, arguments)
        return WorkerTask(self.name, meta.future(), payload)
