"""The cluster over Ray: one actor process for each rank, payloads in the object store. The only file that imports ray.

Columns are stored as numpy arrays, so a worker maps a payload instead of unpickling it, and copies its own rows out:
stored objects are shared by all readers and must not be written to.

Cores: Ray only counts them, the operating system shares them. So no process reserves any, no layout waits for a core,
and processes are put on nodes by us. How many threads compute is set by ``threads`` alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from coalign.cluster.answers import Running, WorkerHandle
from coalign.cluster.base import Cluster
from coalign.cluster.dist import DistActor
from coalign.cluster.future import Meta
from coalign.cluster.placement.devices import accelerator, device_domains, nvidia_buses
from coalign.cluster.placement.nodes import Domain, Node, Nodes, ProcessPlacement, assign, seats
from coalign.cluster.placement.slots import Footprint, Slot, distinct
from coalign.cluster.stacks import Listening, ask, listen
from coalign.cluster.stored import stored
from coalign.cluster.worker import Worker
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.memory.arena import Arena

PLACEMENT_SECONDS = 60.0  # how long Ray may take to reserve devices that are free
RELEASE_SECONDS = 5.0  # how long the devices of a job that has ended may count as held
LOOK_SECONDS = 0.2  # between two looks at what is free
STACKS_SECONDS = 30.0  # how long the nodes may take to tell the stacks of their processes


class RayStore:
    """Payloads in Ray's object store."""

    in_process = False

    def put(self, value: Any) -> ray.ObjectRef:
        return ray.put(stored(value))

    def get(self, ref: ray.ObjectRef) -> Any:
        return ray.get(ref)

    def rows(self, ref: ray.ObjectRef, rows: np.ndarray) -> Batch:
        return ray.get(ref).select(rows)


class Actor:
    """A worker in a process of its own; ``arena``: the device whose memory is looked after."""

    def __init__(self, threads: int | None, visible: Mapping[str, str], arena: str | None = None) -> None:
        os.environ.update(visible)  # not before: Ray hides all devices from an actor that asks it for none
        self._listening = listen()
        self._worker = Worker(RayStore(), threads, Arena(arena) if arena else None)

    def listening(self) -> tuple[str, Listening]:
        """The node that this process is on, and where it writes its stacks."""
        return ray.get_runtime_context().get_node_id(), self._listening

    def address(self) -> str:
        """host:port of this node with a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    @ray.method(num_returns=2)
    def execute(self, verb: str, arguments: tuple[Any, ...]) -> tuple[Meta, Any]:
        meta, payload = self._worker.execute(verb, *arguments)
        return meta, stored(payload)


class RayWorker:
    """A handle to an Actor."""

    def __init__(self, where: str, actor: Any) -> None:
        self.where, self.actor = where, actor

    def execute(self, verb: str, *arguments: Any) -> Running:
        # In a tuple, so that Ray hands references on as they are: the worker fetches the rows it needs.
        meta, payload = self.actor.execute.remote(verb, arguments)
        return Running(self.where, meta.future(), payload)

    def in_parts(self, verbs: Sequence[tuple[Any, ...]]) -> list[Running]:
        return [self.execute(*verb) for verb in verbs]  # an actor keeps the order of one caller's calls


class RayCluster(Cluster):
    """Models on a Ray cluster: the one at ``runtime.ray_address``, or one that starts here and ends with the run.

    All devices of a run are reserved at once, by a placement group with one bundle per node, on the nodes that
    coalign.cluster.placement.nodes has found; which process sees which of them is said by us. Ray gives a device to several
    actors only in fractions, and several devices only whole: so it could not let a model of two devices per process
    share them with one of one device per process.
    """

    store = RayStore()

    def __init__(self, config: RunConfig, models: Mapping[str, ModelConfig] | None = None) -> None:
        super().__init__(config, models)
        # Names are unique over all runs of a Ray cluster.
        self._run = f"{os.path.basename(os.path.normpath(config.output))}-{uuid.uuid4().hex[:6]}"
        self._threads = config.runtime.threads
        self._resource = config.runtime.accelerator
        self._patience = config.runtime.wait_for_devices
        self._groups: list[PlacementGroup] = []
        self._actors: list[Any] = []
        self._listening: dict[str, ray.ObjectRef] = {}  # by what errors call a process
        self._starting = threading.Lock()  # nothing may start while everything is being ended
        self._owner = not ray.is_initialized()
        if self._owner:
            _connect(config.runtime.ray_address)
        try:
            self._place()
        except BaseException:
            self._kill()
            raise

    def _start(self, name: str, slot: Slot, threads: int | None, spmd: bool, exclusive: bool) -> list[DistActor]:
        kind, known = "rank" if spmd else "replica", accelerator(self._resource)
        device = known.device if slot.footprints[name].devices else "cpu"
        arena = device if slot.name in self.residency.slots and exclusive else None
        ranks = []
        for process, seat in enumerate(self.seats[name]):
            visible = {known.visible: ",".join(seat.devices)} if seat.devices else {}
            where = f"{name}, {kind} {process}"
            ranks.append(self._actor(where, f"{name}:{kind}{process}", seat, threads, visible, arena))
        if not spmd:
            return [DistActor([rank], device) for rank in ranks]
        meeting = self._meeting(ranks[0]) if len(ranks) > 1 else None
        return [DistActor(ranks, device, meeting)]

    def _meeting(self, first: RayWorker) -> str:
        """Where the ranks of a model meet."""
        try:
            return ray.get(first.actor.address.remote())
        except RayActorError as lost:
            raise self.error or lost from None  # killed, because another model could not start

    def _actor(
        self,
        where: str,
        name: str,
        seat: ProcessPlacement,
        threads: int | None,
        visible: dict[str, str],
        arena: str | None = None,
    ) -> RayWorker:
        # Ray would set OMP_NUM_THREADS to the cores reserved, and results depend on the number of threads.
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        named = type(f"{self._run}:{name}", (Actor,), {})  # what `ps` and Ray's tools show
        remote = ray.remote(named).options(
            name=f"{self._run}:{name}",
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": env},
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._ids[seat.node], soft=False),
        )
        with self._starting:
            if self.error:
                raise self.error
            actor = remote.remote(threads, visible, arena)
            self._actors.append(actor)
        where += f" on {self.nodes[seat.node].name}" if len(self.nodes) > 1 else ""
        self._listening[where] = actor.listening.remote()
        return RayWorker(where, actor)

    def _place(self) -> None:
        """Give every process its seat, and reserve the devices. ValueError if there is no room."""
        slots = distinct(self.slots)
        self._ids, self.nodes, where = self._assign(slots)
        used = Counter(where[slot.name][place] for slot in slots for place in range(slot.devices))
        devices: list[list[Domain]] = [[] for _ in self.nodes]
        if used:
            for node, told in zip(used, self._reserve(used), strict=True):
                devices[node] = told or [[str(number) for number in range(used[node])]]
        self.seats = seats(slots, where, devices)

    def _assign(self, slots: list[Slot]) -> tuple[list[str], list[Node], dict[str, Nodes]]:
        """Ray's names of the nodes, what is there, and the nodes of each slot."""
        begun = time.monotonic()
        while True:
            ids, nodes = self._look()
            patience = self._patience
            try:
                assign(slots, [replace(node, free=node.total) for node in nodes])
                patience = max(patience, RELEASE_SECONDS)
                return ids, nodes, assign(slots, nodes)
            except ValueError:
                if time.monotonic() - begun >= patience:
                    raise
            time.sleep(LOOK_SECONDS)

    def _look(self) -> tuple[list[str], list[Node]]:
        """The nodes that are alive, by name."""
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda n: (n["NodeName"], n["NodeID"]))
        free, names = available_resources_per_node(), Counter(node["NodeName"] for node in alive)
        nodes = []
        for node in alive:
            name = node["NodeName"] + (f"#{node['NodeID'][:4]}" if names[node["NodeName"]] > 1 else "")
            held, there = free.get(node["NodeID"], {}), node["Resources"]
            count = int(held.get(self._resource, 0)), int(there.get(self._resource, 0))
            nodes.append(Node(name, *count, cores=there.get("CPU", 0.0)))
        return [node["NodeID"] for node in alive], nodes

    def _reserve(self, used: Mapping[int, int]) -> list[list[Domain]]:
        """Reserve so many devices of each node: their names, by node. None of a resource that Ray only counts."""
        bundles = [{self._resource: float(count)} for count in used.values()]
        chosen = [{"ray.io/node-id": self._ids[node]} for node in used]
        group = placement_group(bundles, name=self._run, bundle_label_selector=chosen)
        self._groups.append(group)
        if not group.wait(PLACEMENT_SECONDS):
            raise ValueError(
                f"Ray did not reserve {bundles} on {[self.nodes[node].name for node in used]} within "
                f"{PLACEMENT_SECONDS:g} s, although they were free; free are now {available_resources_per_node()}"
            )
        asked = []
        for bundle, count in enumerate(used.values()):
            held = {"num_gpus": count} if self._resource == "GPU" else {"resources": {self._resource: count}}
            inside = PlacementGroupSchedulingStrategy(group, bundle)
            task = ray.remote(_devices).options(num_cpus=0, scheduling_strategy=inside, **held)
            asked.append(task.remote(self._resource))
        return ray.get(asked)

    @cached_property
    def _functions(self) -> RayWorker:
        if "functions" not in self.slots:
            self._make_room("functions", Footprint(processes=1, devices=0))
        return self._actor("functions", "functions", self.seats["functions"][0], self._threads, {})

    def _helper(self) -> WorkerHandle:
        return self._functions

    def stacks(self) -> dict[str, str]:
        if not self._listening:
            return super().stacks()
        ready, _ = ray.wait([*self._listening.values()], num_returns=len(self._listening), timeout=STACKS_SECONDS)
        nodes: dict[str, dict[str, Listening]] = {}
        for where, reference in self._listening.items():
            if reference in ready:
                node, listening = ray.get(reference)
                nodes.setdefault(node, {})[where] = listening
        asked = [
            ray.remote(ask).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            for node in nodes
        ]
        answers = [task.remote(processes) for task, processes in zip(asked, nodes.values(), strict=True)]
        found = dict.fromkeys(self._listening, "the process has not started, or its node does not answer\n")
        for answer in ray.wait(answers, num_returns=len(answers), timeout=STACKS_SECONDS)[0]:
            found |= ray.get(answer)
        return super().stacks() | found

    def _kill(self) -> None:
        """Also ends Ray itself if it was started here."""
        with self._starting:
            while self._actors:
                ray.kill(self._actors.pop())
            while self._groups:
                remove_placement_group(self._groups.pop())
            if self._owner:
                ray.shutdown()


def _devices(resource: str) -> list[Domain]:
    """The devices that Ray gave the task that calls this, by what lies close together."""
    names = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    return device_domains(names, nvidia_buses() if resource == "GPU" else {})


def _connect(address: str | None) -> None:
    """Join the Ray cluster at ``address``; None: start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers are nice by default: beside any other process of the machine they would hardly compute.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=address or "local", include_dashboard=False, namespace="coalign")
    except ConnectionError as error:
        raise ValueError(
            f"runtime.ray_address: no Ray cluster answers at {address}: {error.__cause__ or error}"
        ) from error
