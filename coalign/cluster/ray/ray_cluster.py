"""The cluster over Ray: one actor process for each rank, payloads in the object store.

No process reserves CPU cores: Ray would only count them, and a layout could wait for a core for ever. The number of
threads that compute is set by ``threads`` alone, and processes are placed on nodes by coalign.cluster.placement.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import ray
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coalign.cluster.cluster import Cluster
from coalign.cluster.dist import DistActor, DistModel
from coalign.cluster.future import LOAD_SECONDS, WorkerHandle, WorkerLost
from coalign.cluster.placement.nodes import ProcessPlacement, find_accelerator
from coalign.cluster.placement.slots import Footprint, Slot, list_slots
from coalign.cluster.ray.actor import Actor, RayWorker
from coalign.cluster.ray.connection import connect, end_in_time
from coalign.cluster.ray.placements import ProcessPlacer
from coalign.cluster.ray.ray_devices import DeviceReservations
from coalign.cluster.ray.space import RayStoreError
from coalign.cluster.ray.store import STORE_SECONDS, RayStore, watch_stores
from coalign.cluster.stacks import StackFile, collect_stacks
from coalign.cluster.survivors.claim import (
    BEAT_SECONDS,
    ORPHAN_SECONDS,
    RunClaim,
    WorkersRecord,
    forget_workers,
    read_workers,
)
from coalign.cluster.survivors.head import RayHead
from coalign.cluster.survivors.takeover import find_key, list_groups, take_over
from coalign.config.schema import ModelConfig, RunConfig
from coalign.threads import begin_in_thread, start_thread

log = logging.getLogger(__name__)
STACKS_SECONDS = 30.0  # how long the nodes may take to send the stacks of their processes


class RayCluster(Cluster):
    """Runs models on the Ray cluster at ``runtime.ray_address``, or on one that starts here and ends with the run.

    With a ``claim`` all processes outlive this driver if it is killed, also a cluster that starts here. The next driver
    of the run takes them over (coalign.cluster.survivors).

    All devices of a run are reserved at once, in a placement group with one bundle per node, on the nodes that
    coalign.cluster.placement.nodes has chosen. An environment variable shows each process its devices. Ray itself
    cannot do that: it shares one device in fractions, but never several devices, so a model with two devices per
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
        self._survivors: dict[str, Any] = {}  # processes of the previous driver without a role yet, by name
        self.epoch = claim.epoch if claim else 0
        self._folder = claim.folder if claim else None
        self._lifetime = "detached" if claim else None  # processes and devices outlive this driver, or do not
        self._head: RayHead | None = None
        self._threads = config.runtime.threads
        self._resource = config.runtime.accelerator
        self._devices = DeviceReservations(self._run, self._resource, self._lifetime)
        self.nodes = self._devices.nodes
        self._placer = ProcessPlacer(self._devices, config.runtime.wait_for_devices)
        self._actors: list[Any] = []
        self._started = Counter[str]()  # starts of a process, by name
        self._process_options: dict[str, tuple[str, int | None, str | None]] = {}  # by model: role, threads, arena
        self._stack_files: dict[str, ray.ObjectRef] = {}  # by a process's name in errors
        self._starting = threading.Lock()  # no actor may start while all are being ended
        self._replacing = threading.Lock()  # the worker of functions
        self._moving = threading.Lock()  # processes to other nodes
        self._numbers: dict[str, list[int]] = {}  # a model's process numbers, in the order of its placements
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
                slots = list_slots(self.slots)
                self.placements = self._placer.place(slots)
                self.driver_node = self._find_driver_node()
            if claim:
                self._write_record(claim.folder, claim.fingerprint)
                start_thread(self._send_signs_of_life, "coalign-ray-life")
            start_thread(partial(watch_stores, self._ended), "coalign-ray-stores")
        except BaseException:
            self._kill()
            raise

    def _hold_ray(self, claim: RunClaim | None) -> str | None:
        """Return the address of a Ray cluster that outlives this process; None without a claim."""
        if claim is None:
            return None
        self._head = RayHead(claim.folder, ORPHAN_SECONDS)
        enable_token_auth_by_default()  # as Ray does for a cluster that it starts itself
        return self._head.address

    def _take_over(self, claim: RunClaim, former: WorkersRecord) -> None:
        """Find the processes of the previous driver. ValueError if it still runs."""
        if former.epoch >= claim.epoch:  # the lock, which counts drivers, has been deleted
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
        self.placements = {name: [*ranks] for name, ranks in former.placements.items()}
        self._devices.take_over(self._run, former.nodes, list_groups(self._run), self.placements)
        self.driver_node = self._find_driver_node()

    def _find_driver_node(self) -> int:
        return self._devices.ids.index(ray.get_runtime_context().get_node_id())

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
        role = "rank" if spmd else "replica"
        device = find_accelerator(self._resource).device if slot.footprints[name].devices else "cpu"
        arena = device if slot.name in self.residency.slots and exclusive else None
        self._process_options[name], self._numbers[name] = (role, threads, arena), [*range(len(self.placements[name]))]
        ranks = [self._start_process(name, number, placement) for number, placement in enumerate(self.placements[name])]
        if not spmd:
            return [DistActor([rank], device) for rank in ranks]
        return [DistActor(ranks, device, self.find_rendezvous(ranks))]

    def _start_process(self, model: str, number: int, placement: ProcessPlacement) -> RayWorker:
        role, threads, arena = self._process_options[model]
        name = f"{model}:{role}{number}" if role else model
        process = f"{model}, {role} {number}" if role else model
        actor = self._start_actor(name, placement, threads, arena)
        full_name = process + (f" on {self.nodes[placement.node].name}" if len(self.nodes) > 1 else "")
        self._stack_files[full_name] = actor.stack_file.remote()
        return RayWorker(full_name, actor, model, number, placement, self)

    def replace_process(self, worker: RayWorker) -> RayWorker:
        """End a process and start an empty one: in its place or, if that node is lost, in another one.

        NoPlaceError if no node has devices for it.
        """
        with self._starting:
            ray.kill(worker.actor)
            with suppress(ValueError):  # an earlier attempt has failed
                self._actors.remove(worker.actor)
        self._stack_files.pop(worker.name, None)
        slot = self.slots[worker.model]
        with self._moving:
            for node in self._placer.find_lost_nodes(slot, self.placements):
                self._forget_placements()
                self.placements |= self._placer.leave_node(node, slot, self.placements)
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
            raise RayStoreError(f"{first.name}: its process did not start within {LOAD_SECONDS:g} s") from None

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

    @cached_property
    def _functions(self) -> RayWorker:
        if "functions" not in self.slots:
            self._add_slot("functions", Footprint(processes=1, devices=0))
        self._process_options["functions"], self._numbers["functions"] = ("", self._threads, None), [0]
        return self._start_process("functions", 0, self.placements["functions"][0])

    def _function_worker(self) -> WorkerHandle:
        return self._functions

    def _forget_placements(self) -> None:
        """Drop the recorded placements, which no longer hold: another driver cannot use these processes."""
        if self._record and self._record.placements:
            self._record = replace(self._record, placements={})
            self._record.write()

    def _add_processes(self, model: DistModel[Any], needs: Footprint, count: int) -> list[WorkerHandle]:
        self._forget_placements()
        name, placements = model.name, self.placements[model.name]
        added = self._placer.place_more(name, needs, count, not model.spmd, self.placements)
        free = (number for number in itertools.count() if number not in self._numbers[name])
        numbers = [*itertools.islice(free, len(added))]
        self.placements[name], self._numbers[name] = [*placements, *added], [*self._numbers[name], *numbers]
        return [self._start_process(name, number, placement) for number, placement in zip(numbers, added, strict=True)]

    def _find_stranded(self) -> set[str]:
        living = self._devices.find_living()
        ranks = [cast(RayWorker, rank) for model in self.models.values() for rank in model.ranks]
        return {rank.name for rank in ranks if rank.placement.node not in living}

    def has_place(self, name: str) -> bool:
        return self._devices.is_ready(name)

    def end_worker(self, rank: WorkerHandle) -> None:
        worker = cast(RayWorker, rank)
        with self._starting:
            ray.kill(worker.actor)
            with suppress(ValueError):  # it was lost, and has been ended
                self._actors.remove(worker.actor)
            self._stack_files.pop(worker.name, None)
        self._forget_placements()
        index = self._numbers[worker.model].index(worker.number)
        del self._numbers[worker.model][index]
        del self.placements[worker.model][index]
        self._placer.give_back(worker.model, worker.placement)

    def _replace_function_worker(self, worker: WorkerHandle, lost: WorkerLost) -> None:
        with self._replacing:
            if worker is self._functions:
                self.count_restart(lost)
                self._functions = cast(RayWorker, worker.replace())

    def stacks(self) -> dict[str, str]:
        texts = dict.fromkeys(self._stack_files, "the process has not started, or its node does not answer\n")
        if self._stack_files:
            asking = begin_in_thread(self._ask_nodes, "coalign-ray-stacks")  # Ray waits for its GCS without a limit
            if concurrent.futures.wait([asking], 3 * STACKS_SECONDS).done:
                texts |= asking.result()
            else:
                texts = dict.fromkeys(texts, "Ray does not answer: its GCS or a raylet stands still\n")
        return super().stacks() | texts

    def _ask_nodes(self) -> dict[str, str]:
        """The stacks that the nodes send in time, by a process's name in errors."""
        ready, _ = ray.wait([*self._stack_files.values()], num_returns=len(self._stack_files), timeout=STACKS_SECONDS)
        nodes: dict[str, dict[str, StackFile]] = {}
        for process, reference in self._stack_files.items():
            if reference in ready:
                node, file = ray.get(reference)
                nodes.setdefault(node, {})[process] = file
        answers = []
        for node, files in nodes.items():
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            answers.append(ray.remote(collect_stacks).options(num_cpus=0, scheduling_strategy=on_node).remote(files))
        texts: dict[str, str] = {}
        for answer in ray.wait(answers, num_returns=len(answers), timeout=STACKS_SECONDS)[0]:
            texts |= ray.get(answer)
        return texts

    def _kill(self) -> None:
        """End all processes, and Ray if it was started here; those that another driver leads go on."""
        self._ended.set()
        record = read_workers(self._folder) if self._folder else None
        leads = record is None or record.epoch == self.epoch
        with self._starting:
            end_in_time(self._end if leads else self._leave)
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
        if self._owner:
            ray.shutdown()
