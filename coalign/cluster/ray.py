"""The cluster over Ray: one actor process for each rank, payloads in the object store.

Batches are stored as numpy arrays. A worker maps a payload instead of unpickling it, and copies its own rows out, since
stored objects are shared by all readers and must not be written to.

No process reserves CPU cores: Ray would only count them, and a layout could wait for a core for ever. The number of
threads that compute is set by ``threads`` alone, and processes are placed on nodes by coalign.cluster.placement.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import numpy as np
import ray
import torch
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray._private.internal_api import node_stats
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import state
from ray.core.generated.node_manager_pb2 import GetNodeStatsRequest  # pyright: ignore[reportAttributeAccessIssue]: made at import
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.exceptions import GetTimeoutError, ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayActorError
from ray.util.placement_group import get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from coalign.cluster.base import Cluster
from coalign.cluster.dist import DistActor, DistModel
from coalign.cluster.future import (
    LOAD_SECONDS,
    Meta,
    PayloadLost,
    WorkerFailure,
    WorkerHandle,
    WorkerLost,
    WorkerTask,
)
from coalign.cluster.placement.nodes import (
    Domain,
    Nodes,
    NoPlaceError,
    ProcessPlacement,
    assign_nodes,
    find_accelerator,
    place_processes,
)
from coalign.cluster.placement.ray_devices import DeviceReservations
from coalign.cluster.placement.slots import Footprint, Slot, list_slots, pack_slots
from coalign.cluster.ray_space import RayStoreError, StoreSpace, describe_open_cluster
from coalign.cluster.stacks import StackFile, collect_stacks, listen
from coalign.cluster.survivors.claim import (
    BEAT_SECONDS,
    ORPHAN_SECONDS,
    LoadedSources,
    ProcessState,
    RunClaim,
    WorkersRecord,
    forget_workers,
    read_workers,
)
from coalign.cluster.survivors.head import RayHead, set_environment
from coalign.cluster.survivors.keeper import has_keepers
from coalign.cluster.survivors.keepers import Keepers
from coalign.cluster.survivors.takeover import find_key, list_groups, take_over
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch, Column
from coalign.memory import Arena
from coalign.threads import begin_in_thread, start_thread


@dataclass(frozen=True, slots=True)
class NumpyColumn:
    """A column as a numpy array; a dtype that numpy lacks is stored as integers of its size."""

    array: np.ndarray
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> NumpyColumn:
        tensor = tensor.detach().cpu().contiguous()
        raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return NumpyColumn(raw.numpy(), tensor.dtype)

    def rows(self, index: np.ndarray | slice) -> Tensor:
        """Copy some rows; the copy may be written to."""
        rows = self.array[index]
        return torch.from_numpy(rows.copy() if isinstance(index, slice) else rows).view(self.dtype)


@dataclass(frozen=True, slots=True)
class NumpyBatch:
    """A Batch whose tensors are numpy arrays."""

    lengths: np.ndarray
    token: Mapping[str, NumpyColumn]
    sequence: Mapping[str, NumpyColumn | list[Any]]

    @staticmethod
    def of(batch: Batch) -> NumpyBatch:
        return NumpyBatch(
            batch.lengths.numpy(),
            {name: NumpyColumn.of(column) for name, column in batch.token.items()},
            {name: NumpyColumn.of(c) if isinstance(c, Tensor) else c for name, c in batch.sequence.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; what lists hold is not counted."""
        columns = (*self.token.values(), *self.sequence.values())
        return self.lengths.nbytes + sum(each.array.nbytes for each in columns if isinstance(each, NumpyColumn))

    def select(self, rows: np.ndarray) -> Batch:
        """Copy the sequences ``rows`` (i64), in this order."""
        lengths, ends = self.lengths[rows], self.lengths.cumsum()
        starts = ends[rows] - lengths
        # Token t comes from where its row starts, plus its distance from where the row starts in the result.
        moved = starts - lengths.cumsum() + lengths
        whole = len(rows) > 0 and bool((moved == moved[0]).all())  # one piece
        tokens = (
            slice(starts[0], starts[0] + lengths.sum()) if whole else moved.repeat(lengths) + np.arange(lengths.sum())
        )
        sequence: dict[str, Column] = {
            name: column.rows(rows) if isinstance(column, NumpyColumn) else [column[i] for i in rows]
            for name, column in self.sequence.items()
        }
        return Batch(
            torch.from_numpy(lengths), {name: column.rows(tokens) for name, column in self.token.items()}, sequence
        )


def to_numpy(value: Any) -> Any:
    """Convert a Batch into a NumpyBatch; other values are returned unchanged."""
    return NumpyBatch.of(value) if isinstance(value, Batch) else value


CONNECT_SECONDS = 30.0  # how long a cluster that runs already may take to answer
RELEASE_SECONDS = 5.0  # how long the devices of a job that has ended may count as used
log = logging.getLogger(__name__)
POLL_SECONDS = 0.2  # between two queries of the free devices
GCS_SECONDS = 60.0  # how long Ray's control store (GCS) may take to say which nodes there are
STACKS_SECONDS = 30.0  # how long the nodes may take to send the stacks of their processes
MEASURE_SECONDS = 2.0  # how long a worker waits to hear what its store has free
STORE_SECONDS = 1800.0  # how long an object store may take to give or take a payload
FULL_SECONDS = 120.0  # the same, while it can spill nothing more: Ray waits for ever for a payload that was not stored
LOOK_SECONDS = 15.0  # between two looks at a store that has not answered
WATCH_SECONDS = 30.0  # between two looks at what the stores have spilled
LEAVE_SECONDS = 30.0  # how long Ray may take to end
Value = TypeVar("Value")


class RayStore:
    """Keeps payloads in Ray's object store."""

    in_process = False

    def put(self, value: Any) -> ray.ObjectRef:
        return _use_store(partial(ray.put, to_numpy(value)))

    def get(self, ref: ray.ObjectRef) -> Any:
        return _use_store(partial(ray.get, ref))

    def rows(self, ref: ray.ObjectRef, rows: np.ndarray) -> Batch:
        return self.get(ref).select(rows)


class Actor:
    """A worker in a process of its own; ``arena``: the device whose memory is managed (None: no device's).

    It obeys the driver of the newest ``epoch``. With ``orphan_seconds`` it ends when it has not heard of one for so
    long.
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
        node = ray.get_runtime_context().get_node_id()
        self._worker = Worker(RayStore(), threads, Arena(arena) if arena else None, node)
        self._space: StoreSpace | None = None  # as it was measured first
        self._sources = LoadedSources()
        self._sources.note()
        self._epoch, self._heard = epoch, time.monotonic()
        self._calls, self._busy, self._failed, self._is_taken_over = 0, False, False, False
        self._changed: str | None = None  # a source file that had changed when another driver came
        if orphan_seconds is not None:
            start_thread(partial(self._end_as_orphan, orphan_seconds), "coalign-orphan")

    @ray.method(concurrency_group="control")
    def peek(self) -> ProcessState:
        """How this process is. It answers whatever it is doing, as the methods below."""
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
        asking = begin_in_thread(lambda: _measure_store(_find_own_node()), "coalign-ray-store")
        try:
            return asking.result(MEASURE_SECONDS)
        except (grpc.RpcError, TimeoutError):
            return None

    def _find_lack(self, payload: int) -> str | None:
        """Describe a store that cannot take ``payload`` bytes: Ray would lose a result, and say nothing."""
        self._space = self._space or self._measure_space()
        if self._space is None or self._space.count_spillable() > self._space.size + payload:
            return None  # it need not be asked
        space = self._measure_space()
        return space.describe() if space is not None and space.lacks(payload) else None


class RayWorker:
    """A handle to an Actor: process ``number`` of ``model``, at its ``placement``."""

    def __init__(
        self, where: str, actor: Any, model: str, number: int, placement: ProcessPlacement, cluster: RayCluster
    ) -> None:
        self.where, self.actor, self._cluster = where, actor, cluster
        self.model, self.number, self.placement = model, number, placement

    def replace(self) -> RayWorker:
        return self._cluster.replace_process(self)

    def execute(self, verb: str, *arguments: Any) -> WorkerTask:
        # In a tuple, so that Ray does not fetch the references among them: the worker fetches the rows that it needs.
        meta, payload = self.actor.execute.remote(self._cluster.epoch, verb, arguments)
        return WorkerTask(self.where, meta.future(), payload)

    def execute_all(self, verbs: Sequence[tuple[Any, ...]]) -> list[WorkerTask]:
        return [self.execute(*verb) for verb in verbs]  # an actor keeps the order of one caller's calls


class RayCluster(Cluster):
    """Runs models on the Ray cluster at ``runtime.ray_address``, or on one that starts here and ends with the run.

    With a ``claim`` all processes outlive this driver if it is killed, also a cluster that starts here. The next driver
    of the run takes them over (coalign.cluster.survivors).

    All devices of a run are reserved at once, in a placement group with one bundle per node, on the nodes that
    coalign.cluster.placement.nodes has chosen. An environment variable shows each process its devices. Ray itself
    cannot do that: it shares a device only in fractions and several devices only whole, so a model with two devices per
    process could not share them with a model with one.
    """

    store = RayStore()

    def __init__(
        self,
        config: RunConfig,
        models: Mapping[str, ModelConfig] | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        super().__init__(config, models)
        # Names of actors must be unique over all runs of a Ray cluster.
        self._run = f"{os.path.basename(os.path.normpath(config.output))}-{uuid.uuid4().hex[:6]}"
        self._record: WorkersRecord | None = None  # by which the next driver finds the processes
        self._survivors: dict[str, Any] = {}  # of the driver before, by name, that have no role yet
        self.epoch = claim.epoch if claim else 0
        self._folder = claim.folder if claim else None
        self._lifetime = "detached" if claim else None  # of processes and reserved devices; None: this driver's
        self._head: RayHead | None = None
        self._threads = config.runtime.threads
        self._resource = config.runtime.accelerator
        self._devices = DeviceReservations(self._run, self._resource, self._lifetime)
        self.nodes = self._devices.nodes
        self._patience = config.runtime.wait_for_devices
        self._actors: list[Any] = []
        self._started = Counter[str]()  # how often a process of this name was
        self._kinds: dict[str, tuple[str, int | None, str | None]] = {}  # of a model's processes: name, threads, arena
        self._spare: dict[str, list[ProcessPlacement]] = {}  # where a model had processes, with devices of this run
        self._stack_files: dict[str, ray.ObjectRef] = {}  # by a process's name in errors
        self._starting = threading.Lock()  # no actor may start while all are being ended
        self._replacing = threading.Lock()  # the worker of functions
        self._moving = threading.Lock()  # processes to other nodes
        self._numbers: dict[str, list[int]] = {}  # of a model's processes, in the order of their placements
        self._owner = not ray.is_initialized()
        self._ended = threading.Event()
        self._call_seconds = config.runtime.call_timeout or STORE_SECONDS
        try:
            if self._owner:
                connect(config.runtime.ray_address or self._hold_ray(claim))
            former = read_workers(claim.folder) if claim else None
            if claim and former:
                self._take_over(claim, former)
            if not self._survivors:
                self._place()
            if claim:
                self._write_record(claim.folder, claim.fingerprint)
                start_thread(self._send_signs_of_life, "coalign-ray-life")
            start_thread(self._watch_stores, "coalign-ray-stores")
        except BaseException:
            self._kill()
            raise

    def _hold_ray(self, claim: RunClaim | None) -> str | None:
        """Return the address of a Ray cluster that outlives this process; None without a claim."""
        if claim is None:
            return None
        self._head = RayHead(claim.folder, ORPHAN_SECONDS)
        enable_token_auth_by_default()  # as Ray does where it starts
        return self._head.address

    def _take_over(self, claim: RunClaim, former: WorkersRecord) -> None:
        """Find the processes of the driver before. ValueError if it still goes."""
        if former.epoch >= claim.epoch:  # somebody has deleted the lock, which counts
            claim = replace(claim, epoch=former.epoch + 1)
        self.epoch = claim.epoch
        self._survivors = take_over(claim, former)
        if not self._survivors:
            return
        self._run = former.name
        for name in self._survivors:
            key, _, count = name.removeprefix(f"{self._run}:").partition("#")
            self._started[key] = max(self._started[key], int(count or 0) + 1)
        log.info("taking over %s", ", ".join(sorted(find_key(self._run, name) for name in self._survivors)))
        self._actors += self._survivors.values()
        self.placements = {name: [*places] for name, places in former.placements.items()}
        self._devices.take_over(self._run, former.nodes, list_groups(self._run), self.placements)
        self.own_node = self._devices.ids.index(ray.get_runtime_context().get_node_id())

    def _write_record(self, folder: Path, fingerprint: str) -> None:
        name = str(folder.absolute())
        self._record = WorkersRecord(self._run, name, self.epoch, fingerprint, self._devices.ids, self.placements)
        self._record.write()

    def _send_signs_of_life(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            for actor in [*self._actors]:
                with suppress(Exception):  # it is being replaced, or Ray ends
                    actor.hear.remote(self.epoch)

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        kind = "rank" if spmd else "replica"
        device = find_accelerator(self._resource).device if slot.footprints[name].devices else "cpu"
        arena = device if slot.name in self.residency.slots and exclusive else None
        self._kinds[name], self._numbers[name] = (kind, threads, arena), [*range(len(self.placements[name]))]
        ranks = [self._start_process(name, number, place) for number, place in enumerate(self.placements[name])]
        if not spmd:
            return [DistActor([rank], device) for rank in ranks]
        return [DistActor(ranks, device, self.find_rendezvous(ranks))]

    def _start_process(self, model: str, number: int, placement: ProcessPlacement) -> RayWorker:
        kind, threads, arena = self._kinds[model]
        name = f"{model}:{kind}{number}" if kind else model
        where = f"{model}, {kind} {number}" if kind else model
        actor = self._start_actor(name, placement, threads, arena)
        full = where + (f" on {self.nodes[placement.node].name}" if len(self.nodes) > 1 else "")
        self._stack_files[full] = actor.stack_file.remote()
        return RayWorker(full, actor, model, number, placement, self)

    def replace_process(self, worker: RayWorker) -> RayWorker:
        """End a process and start an empty one: in its place or, if that node is lost, in another one.

        NoPlaceError if no node has devices for it.
        """
        with self._starting:
            ray.kill(worker.actor)
            with suppress(ValueError):  # an attempt before has failed
                self._actors.remove(worker.actor)
        self._stack_files.pop(worker.where, None)
        with self._moving:
            self._leave_lost_nodes(worker.model)
        index = self._numbers[worker.model].index(worker.number)
        return self._start_process(worker.model, worker.number, self.placements[worker.model][index])

    def find_rendezvous(self, ranks: Sequence[WorkerHandle]) -> str | None:
        if len(ranks) == 1:
            return None
        first = cast(RayWorker, ranks[0])
        try:
            return cast(str, ray.get(first.actor.address.remote(), timeout=LOAD_SECONDS))
        except RayActorError as lost:
            raise self.error or lost from None  # killed, because another model could not start
        except GetTimeoutError:
            raise RayStoreError(f"{first.where}: its process did not start within {LOAD_SECONDS:g} s") from None

    def _start_actor(self, name: str, placement: ProcessPlacement, threads: int | None, arena: str | None) -> Any:
        # Ray would set OMP_NUM_THREADS to the cores reserved, and results depend on the number of threads.
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        accelerator = find_accelerator(self._resource)
        visible = {accelerator.visible: ",".join(placement.devices)} if placement.devices else {}
        actor = self._survivors.pop(self._name_process(name, self._started[name] - 1), None)
        if actor is not None:
            return actor
        full_name = self._name_process(name, self._started[name])
        self._started[name] += 1
        named = type(full_name, (Actor,), {})  # what `ps` and Ray's tools show
        remote = cast(Any, ray.remote)(concurrency_groups={"control": 1})(named).options(
            name=full_name,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": env},
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._devices.ids[placement.node], soft=False),
            lifetime=self._lifetime,
        )
        with self._starting:
            if self.error:
                raise self.error
            actor = remote.remote(threads, visible, arena, self.epoch, ORPHAN_SECONDS if self._lifetime else None)
            self._actors.append(actor)
        return actor

    def _name_process(self, name: str, starts: int) -> str:
        return f"{self._run}:{name}" + (f"#{starts}" if starts else "")

    def _place(self) -> None:
        """Place every process, and reserve the devices. ValueError if there are not enough."""
        slots = list_slots(self.slots)
        where = self._assign(slots)
        self.own_node = self._devices.ids.index(ray.get_runtime_context().get_node_id())
        self.placements = self._reserve_places(slots, where)

    def _reserve_places(self, slots: list[Slot], where: Mapping[str, Nodes]) -> dict[str, list[ProcessPlacement]]:
        """Reserve the devices of slots on their nodes, and place each process, by model and rank."""
        used = Counter(where[slot.name][place] for slot in slots for place in range(slot.devices))
        devices: list[list[Domain]] = [[] for _ in self.nodes]
        if used:
            for node, domains in zip(used, self._devices.reserve(used), strict=True):
                devices[node] = domains
        return place_processes(slots, where, devices)

    def _assign(self, slots: list[Slot]) -> dict[str, Nodes]:
        """The nodes of each slot. Waits for devices of other jobs."""
        start = time.monotonic()
        while True:
            nodes = self._devices.update()
            patience = self._patience
            try:
                assign_nodes(slots, [replace(node, free=node.total) for node in nodes])
                patience = max(patience, RELEASE_SECONDS)
                return assign_nodes(slots, nodes)
            except ValueError:
                if time.monotonic() - start >= patience:
                    raise
            time.sleep(POLL_SECONDS)

    @cached_property
    def _functions(self) -> RayWorker:
        if "functions" not in self.slots:
            self._add_slot("functions", Footprint(processes=1, devices=0))
        self._kinds["functions"], self._numbers["functions"] = ("", self._threads, None), [0]
        return self._start_process("functions", 0, self.placements["functions"][0])

    def _function_worker(self) -> WorkerHandle:
        return self._functions

    def open_keepers(self, run: Path, models: Sequence[str]) -> Keepers | None:
        if self.keepers is None and (len(self._devices.update()) > 1 or has_keepers(run)):
            self.keepers = Keepers(run, self._devices.ids, self.own_node, self._call_seconds)
        if self.keepers is not None:
            ranks = {name: [place.node for place in self.placements[name]] for name in models}
            self.keepers.choose(ranks, [node.name for node in self.nodes])
        return self.keepers

    def _forget_placements(self) -> None:
        """Processes are elsewhere than the record says: another driver cannot use them."""
        if self._record and self._record.placements:
            self._record = replace(self._record, placements={})
            self._record.write()

    def _add_processes(self, model: DistModel[Any], needs: Footprint, count: int) -> list[WorkerHandle]:
        self._forget_placements()
        name, placements = model.name, self.placements[model.name]
        found = self._find_places(model, needs, count)
        free = (number for number in itertools.count() if number not in self._numbers[name])
        numbers = [*itertools.islice(free, len(found))]
        self.placements[name], self._numbers[name] = [*placements, *found], [*self._numbers[name], *numbers]
        return [self._start_process(name, number, place) for number, place in zip(numbers, found, strict=True)]

    def _find_places(self, model: DistModel[Any], needs: Footprint, count: int) -> list[ProcessPlacement]:
        """Find places for ``count`` more processes; for replicas on devices perhaps fewer, and the others wait."""
        spare = self._spare.setdefault(model.name, [])
        living = self._devices.find_living()
        found = [placement for placement in spare if placement.node in living][: max(0, count)]
        self._spare[model.name] = [placement for placement in spare if placement not in found]
        missing = max(0, count - len(found))
        if needs.devices and not model.spmd:
            beside = {placement.node for placement in (*self.placements[model.name], *spare)}
            return found + self._devices.require(model.name, missing, needs.devices, beside)
        return found + (self._place_more(model.name, replace(needs, processes=missing)) if missing else [])

    def _find_stranded(self) -> set[str]:
        living = self._devices.find_living()
        ranks = [cast(RayWorker, rank) for model in self.models.values() for rank in model.ranks]
        return {rank.where for rank in ranks if rank.placement.node not in living}

    def has_place(self, name: str) -> bool:
        return self._devices.is_ready(name)

    def _place_more(self, name: str, needs: Footprint) -> list[ProcessPlacement]:
        """Place processes beside those that run, also on nodes that are new. ValueError without enough devices."""
        slots = list_slots(pack_slots({name: needs}, []))
        return self._reserve_places(slots, self._assign_living(slots))[name]

    def _assign_living(self, slots: list[Slot]) -> dict[str, Nodes]:
        """The nodes of slots that come to those that run, among nodes that live."""
        nodes, living = self._devices.update(), sorted(self._devices.find_living())
        busy = Counter(placement.node for ranks in self.placements.values() for placement in ranks)
        where = assign_nodes(slots, [replace(nodes[number], processes=busy[number]) for number in living])
        return {name: tuple(living[place] for place in places) for name, places in where.items()}

    def _leave_lost_nodes(self, name: str) -> None:
        """Place what a model had on lost nodes on others. NoPlaceError if none has so many free devices.

        What the models of one slot had on a node stays together, on one node.
        """
        slot, living = self.slots[name], self._devices.find_living()
        placed = [placement for model in slot.places for placement in self.placements[model]]
        for node in sorted({placement.node for placement in placed} - living):
            self._forget_placements()
            devices = sorted({device for each in placed if each.node == node for device in each.devices})
            to = self._find_devices(slot, node, devices) if devices else {}
            for model in slot.places:
                self.placements[model] = [
                    self._move(each, to) if each.node == node else each for each in self.placements[model]
                ]

    def _find_devices(self, slot: Slot, lost: int, devices: Sequence[str]) -> dict[str, ProcessPlacement]:
        """Reserve devices on one node in place of those on a lost one; where each is now. Waits for nodes to come.

        NoPlaceError if no node has so many.
        """
        end = time.monotonic() + self._patience
        while True:
            nodes, alike = self._devices.update(), self._devices.list_alike(lost)
            if fitting := [number for number in alike if nodes[number].free >= len(devices)]:
                node = min(fitting, key=lambda number: (nodes[number].free, number))
                [domains] = self._devices.reserve({node: len(devices)})
                names = [name for domain in domains for name in domain]
                return {old: ProcessPlacement(node, (new,)) for old, new in zip(devices, names, strict=True)}
            if time.monotonic() > end:
                raise NoPlaceError(
                    f"node {nodes[lost].name} is lost, where {slot.name} had {len(devices)} devices, and no other one "
                    f"of its kind has so many free within {self._patience:g} s (runtime.wait_for_devices)"
                )
            time.sleep(POLL_SECONDS)

    def _move(self, before: ProcessPlacement, to: Mapping[str, ProcessPlacement]) -> ProcessPlacement:
        """Where a process goes that was on a lost node: to devices in place of its own, or to any node."""
        self._devices.give_back(before)
        if before.devices:
            found = [to[device] for device in before.devices]
            return ProcessPlacement(found[0].node, tuple(device for each in found for device in each.devices))
        [slot] = list_slots(pack_slots({"moved": Footprint(processes=1, devices=0)}, []))
        return ProcessPlacement(self._assign_living([slot])["moved"][0])

    def end_worker(self, rank: WorkerHandle) -> None:
        worker = cast(RayWorker, rank)
        with self._starting:
            ray.kill(worker.actor)
            with suppress(ValueError):  # it was lost, and has been ended
                self._actors.remove(worker.actor)
            self._stack_files.pop(worker.where, None)
        self._forget_placements()
        index = self._numbers[worker.model].index(worker.number)
        del self._numbers[worker.model][index]
        del self.placements[worker.model][index]
        if not self._devices.give_back(worker.placement):
            self._spare.setdefault(worker.model, []).append(worker.placement)

    def _replace_function_worker(self, worker: WorkerHandle, lost: WorkerLost) -> None:
        with self._replacing:
            if worker is self._functions:
                self.count_restart(lost)
                self._functions = cast(RayWorker, worker.replace())

    def stacks(self) -> dict[str, str]:
        found = dict.fromkeys(self._stack_files, "the process has not started, or its node does not answer\n")
        if self._stack_files:
            asking = begin_in_thread(self._ask_nodes, "coalign-ray-stacks")  # Ray waits for its GCS without a limit
            if concurrent.futures.wait([asking], 3 * STACKS_SECONDS).done:
                found |= asking.result()
            else:
                found = dict.fromkeys(found, "Ray does not answer: its GCS or a raylet stands still\n")
        return super().stacks() | found

    def _ask_nodes(self) -> dict[str, str]:
        """The stacks that the nodes send in time, by a process's name in errors."""
        ready, _ = ray.wait([*self._stack_files.values()], num_returns=len(self._stack_files), timeout=STACKS_SECONDS)
        nodes: dict[str, dict[str, StackFile]] = {}
        for where, reference in self._stack_files.items():
            if reference in ready:
                node, file = ray.get(reference)
                nodes.setdefault(node, {})[where] = file
        answers = []
        for node, files in nodes.items():
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            answers.append(ray.remote(collect_stacks).options(num_cpus=0, scheduling_strategy=on_node).remote(files))
        found: dict[str, str] = {}
        for answer in ray.wait(answers, num_returns=len(answers), timeout=STACKS_SECONDS)[0]:
            found |= ray.get(answer)
        return found

    def _kill(self) -> None:
        """Also ends Ray itself if it was started here. What another driver of the run leads goes on."""
        self._ended.set()
        record = read_workers(self._folder) if self._folder else None
        leads = record is None or record.epoch == self.epoch
        with self._starting:
            _end_in_time(self._end if leads else self._leave)
        if leads and self._folder:
            forget_workers(self._folder)
            if self._head:
                self._head.end()

    def _end(self) -> None:
        while self._actors:
            ray.kill(self._actors.pop())
        self._devices.release()
        self._leave()

    def _leave(self) -> None:
        if self.keepers is not None:
            self.keepers.close()
        if self._owner:
            ray.shutdown()

    def _watch_stores(self) -> None:
        """Log once for each node that its store has begun to spill, which makes every batch slower."""
        known: set[str] = set()
        while not self._ended.wait(WATCH_SECONDS):
            try:
                for node in [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known]:
                    if (space := _measure_store(node)).spilled:
                        known.add(node["NodeID"])
                        log.warning("%s", space.describe_spilling())
            except Exception as problem:  # Ray has ended, or a node does not answer: calls will say so
                log.debug("the stores of Ray were not measured: %s", problem)


def count_cluster_devices(address: str, resource: str) -> int:
    """Count the devices of the Ray cluster at ``address``, in use or not. ValueError if nothing answers there."""
    joined = ray.is_initialized()
    if not joined:
        connect(address)
    try:
        return int(ray.cluster_resources().get(resource, 0))
    finally:
        if not joined:
            ray.shutdown()


@contextmanager
def join_keepers(address: str, run: Path, seconds: float | None) -> Iterator[Keepers]:
    """Yield the keepers of a run's checkpoints, before the run has a cluster. ValueError if no Ray cluster answers.

    They may take ``seconds`` for what they are asked (None: half an hour).
    """
    joined = ray.is_initialized()
    if not joined:
        connect(address)
    keepers = Keepers(run, [ray.get_runtime_context().get_node_id()], 0, seconds or STORE_SECONDS)
    try:
        yield keepers
    finally:
        keepers.close()
        if not joined:
            ray.shutdown()


def connect(address: str | None) -> None:
    """Join the Ray cluster at ``address``; None: start one here."""
    set_environment()
    if address is not None:
        _wait_for_answer(address)
    try:
        ray.init(address=address or "local", include_dashboard=False, namespace="coalign")
    except ConnectionError as error:
        raise ValueError(f"runtime.ray_address: {_describe_refusal(address, error)}") from error
    if not _asks_for_token(_find_own_node()):
        log.warning("%s", describe_open_cluster(address))


def _describe_refusal(address: str | None, error: ConnectionError) -> str:
    reason = str(error.__cause__ or error).strip()
    if "InvalidAuthToken" in reason:
        return (
            f"the Ray cluster at {address} asks for another token than the one here (RAY_AUTH_TOKEN, or "
            "~/.ray/auth_token, with RAY_AUTH_MODE=token); copy the file from its head node (docs/ports.md)"
        )
    return f"no Ray cluster answers at {address}: {reason.splitlines()[-1] if reason else error}"


def _wait_for_answer(address: str) -> None:
    """Refuse (ValueError) an address at which nothing answers in time: ``ray.init`` would wait for minutes, deaf to
    signals."""
    found = canonicalize_bootstrap_address(address.removeprefix("ray://"))
    if found is None or os.environ.get("RAY_USE_TLS") == "1":  # ray.init says what is missing; TLS needs certificates
        return
    with grpc.insecure_channel(found) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise ValueError(
                f"runtime.ray_address: no Ray cluster answers at {address} ({found}) within {CONNECT_SECONDS:g} s. "
                "Does `ray status` work there, is the port that of `ray start --head` (6379 by default), and can this "
                "machine reach it?"
            ) from None


def _asks_for_token(node: Mapping[str, Any]) -> bool:
    """Whether a node refuses who has no token: it is asked without one, whatever this process has."""
    with grpc.insecure_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        try:
            NodeManagerServiceStub(channel).GetNodeStats(GetNodeStatsRequest(), timeout=STACKS_SECONDS)
        except grpc.RpcError:
            return True
    return False


def _end_in_time(end: Callable[[], None]) -> None:
    """End what runs on Ray, unless a raylet that does not answer keeps it from ending.

    Its processes then end with this one, as after `kill -9`. Killed now, the raylet would take this process with it.
    """
    ending = start_thread(end, "coalign-ray-end")
    ending.join(LEAVE_SECONDS)
    if ending.is_alive():
        message = "Ray did not end within %g s: its GCS or a raylet does not answer; it ends with this process"
        log.warning(message, LEAVE_SECONDS)
        atexit.unregister(ray.shutdown)  # it would wait again


def _find_own_node() -> dict[str, Any]:
    """Ray's record of the node that this process is on."""
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == own)


def _measure_store(node: Mapping[str, Any]) -> StoreSpace:
    """Ask a node for the state of its store. grpc.RpcError if it does not answer within 30 s."""
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    spilling = json.loads(state.get_system_config().get("object_spilling_config") or "{}")
    return StoreSpace(
        node["NodeName"],
        stats.object_store_bytes_avail,  # of all, not of those that are free
        stats.object_store_bytes_primary_copy,
        stats.spilled_bytes_total,
        spilling.get("params", {}).get("directory_path", ""),
    )


def _use_store(action: Callable[[], Value]) -> Value:
    """Put or get a payload. RayStoreError if the store is full, gone, or does not answer; PayloadLost.

    Ray's own deadlines do not hold while a raylet is stopped, so a thread acts and this one waits.
    """
    done = begin_in_thread(action, "coalign-ray-store")
    begun = time.monotonic()
    while True:
        if concurrent.futures.wait([done], LOOK_SECONDS).done:
            try:
                return done.result()
            except (OutOfDiskError, ObjectStoreFullError) as full:
                raise RayStoreError(_measure_store(_find_own_node()).describe()) from full
            except (ObjectLostError, RayActorError) as lost:  # its node, or the process that was to make it
                raise PayloadLost(str(lost).strip().partition("\n")[0]) from lost
        seconds = time.monotonic() - begun
        asking = begin_in_thread(_find_own_node, "coalign-ray-node")
        if not concurrent.futures.wait([asking], GCS_SECONDS).done:
            raise RayStoreError(f"Ray's control store (GCS) has not answered for {GCS_SECONDS:g} s: is it stopped?")
        node = asking.result()
        where = f"the object store of Ray on node {node['NodeName']}"
        if not node["Alive"]:
            raise RayStoreError(f"{where} is lost: its raylet is stopped, has ended, or cannot be reached")
        if seconds > STORE_SECONDS:
            raise RayStoreError(f"{where} has not answered for {seconds:.0f} s; look at its raylet and at `ray memory`")
        with suppress(grpc.RpcError):  # one that does not answer has its own deadline
            if seconds > FULL_SECONDS and not (space := _measure_store(node)).count_spillable():
                raise RayStoreError(space.describe())
