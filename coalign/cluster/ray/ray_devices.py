"""The nodes of a Ray cluster and their devices: which live, what a run has reserved there, what it still waits for.

Nodes have numbers. One that is lost keeps its number; one that comes, or comes back, is a new node to Ray and gets the
next number.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coalign.cluster.future import LOAD_SECONDS
from coalign.cluster.placement.nodes import Domain, Node, ProcessPlacement, group_devices, read_nvidia_buses
from coalign.cluster.ray.space import RayStoreError

PLACEMENT_SECONDS = 60.0  # how long Ray may take to reserve devices that are free
READY_SECONDS = 3.0  # the same for replicas, before they count as waiting
ANSWER_SECONDS = 5.0  # how long a raylet may take to accept a connection
NODE_ID, DEVICE_KIND = "ray.io/node-id", "ray.io/accelerator-type"  # Ray's labels of a node
log = logging.getLogger(__name__)


class DeviceReservations:
    """Devices that a run has reserved on the nodes of a Ray cluster, and those that its replicas wait for.

    ``nodes[i]`` is node i as it was last seen, ``ids[i]`` its id. ``lifetime``: `detached` for reservations
    that outlive this driver.
    """

    def __init__(self, run: str, resource: str, lifetime: str | None = None) -> None:
        self.run = run
        self.resource = resource
        self.lifetime = lifetime
        self.ids: list[str] = []
        self.nodes: list[Node] = []
        self._device_types: dict[int, str] = {}  # by node; nodes that do not report one are left out
        self._wanted: dict[str, set[str]] = {}  # device types that a model's replicas wait for; empty: any
        self._refused: set[tuple[str, int]] = set()  # models and nodes of another type that the log has named
        self._groups: list[PlacementGroup] = []
        self._single: dict[ProcessPlacement, PlacementGroup] = {}  # groups that hold one process
        self._waiting: dict[str, list[PlacementGroup]] = {}  # groups that a model's replicas wait for
        self._numbers = itertools.count()  # in the names of groups
        self._counted = Counter[int]()  # devices without names that were given one, by node
        self._lock = threading.Lock()

    def take_over(
        self, run: str, ids: Sequence[str], groups: Sequence[str], placements: Mapping[str, Sequence[ProcessPlacement]]
    ) -> None:
        """Go on with what another driver has reserved: nodes in its order, its groups by name, and its processes."""
        self.run = run
        self.update(ids)
        self._groups += [get_placement_group(name) for name in groups]
        self._numbers = itertools.count(1 + max((int(name.rpartition("devices")[2]) for name in groups), default=-1))
        processes = [placement for ranks in placements.values() for placement in ranks]
        self._counted = Counter(node for node, _ in {(p.node, name) for p in processes for name in p.devices})

    def update(self, first: Sequence[str] = ()) -> list[Node]:
        """Number new nodes, and return the current state of all; lost ones have no devices.

        The ``first`` ids are numbered before others, which follow by their names.
        """
        order = {node_id: index for index, node_id in enumerate(first)}
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda n: (order.get(n["NodeID"], len(order)), n["NodeName"], n["NodeID"]))
        free, names = available_resources_per_node(), Counter(node["NodeName"] for node in alive)
        with self._lock:
            there: dict[int, Node] = {}
            for record in alive:
                node_id, name, total = record["NodeID"], record["NodeName"], record["Resources"]
                if node_id not in self.ids:
                    number = len(self.ids)
                    if names[name] > 1 or name in (node.name for node in self.nodes):
                        name += f"#{node_id[:4]}"
                    self.ids.append(node_id)
                    self.nodes.append(Node(name, 0, int(total.get(self.resource, 0)), cores=total.get("CPU", 0.0)))
                    if device_type := record.get("Labels", {}).get(DEVICE_KIND):
                        self._device_types[number] = device_type
                number = self.ids.index(node_id)
                count = int(free.get(node_id, {}).get(self.resource, 0))
                self.nodes[number] = there[number] = replace(self.nodes[number], free=count)
            return [there.get(number, replace(node, free=0, total=0)) for number, node in enumerate(self.nodes)]

    def find_living(self) -> set[int]:
        """Return the numbers of the nodes that live: Ray says so, and their raylets accept connections."""
        return {self.ids.index(r["NodeID"]) for r in ray.nodes() if r["NodeID"] in self.ids and _is_reachable(r)}

    def list_alike(self, node: int) -> set[int]:
        """Return the living nodes that have devices of the same type as a node."""
        wanted = self._device_types.get(node)
        return {number for number in self.find_living() if self._device_types.get(number) == wanted}

    def reserve(self, used: Mapping[int, int]) -> list[list[Domain]]:
        """Reserve ``used`` devices by node; return their names, by node. Those that Ray only counts are numbered.

        ValueError if Ray does not reserve them.
        """
        bundles = [{self.resource: float(count)} for count in used.values()]
        chosen = [{NODE_ID: self.ids[node]} for node in used]
        group = self._create_group(bundles, chosen)
        self._groups.append(group)
        if not group.wait(PLACEMENT_SECONDS):
            raise ValueError(
                f"Ray did not reserve {bundles} on {[self.nodes[node].name for node in used]} within "
                f"{PLACEMENT_SECONDS:g} s, although they were free; free are now {available_resources_per_node()}"
            )
        return self._list_devices(group, used)

    def require(self, model: str, count: int, devices: int, beside: Collection[int]) -> list[ProcessPlacement]:
        """Let ``count`` replicas of a model wait, each for ``devices`` on one node; return the placements ready now.

        The devices are of the types that the nodes ``beside`` have. Ray's autoscaler sees waiting replicas as demand.
        """
        waiting = self._waiting.setdefault(model, [])
        while len(waiting) > count:
            remove_placement_group(waiting.pop())
        types = self._wanted[model] = {self._device_types[node] for node in beside if node in self._device_types}
        chosen = [{DEVICE_KIND: f"in({','.join(sorted(types))})"}] if types else [{}]
        new = [self._create_group([{self.resource: float(devices)}], chosen) for _ in range(count - len(waiting))]
        waiting += new
        end = time.monotonic() + READY_SECONDS
        for group in new:
            group.wait(max(0.0, end - time.monotonic()))
        there = [(group, node) for group in waiting if (node := self._find_node(group)) is not None]
        return [self._occupy(model, group, node, devices) for group, node in there]

    def is_ready(self, model: str) -> bool:
        """Whether a replica that waits has its devices now, or none waits yet."""
        if not (waiting := self._waiting.get(model)):
            return True
        self._report_mismatches(model, self._wanted[model])
        return any(self._find_node(group) is not None for group in waiting)

    def give_back(self, placement: ProcessPlacement) -> bool:
        """End the reservation of a process; return whether it had a separate one."""
        group = self._single.pop(placement, None)
        if group is not None:
            remove_placement_group(group)
        return group is not None

    def release(self) -> None:
        """End all reservations."""
        for group in (*self._groups, *self._single.values(), *(g for groups in self._waiting.values() for g in groups)):
            remove_placement_group(group)
        self._groups, self._single, self._waiting = [], {}, {}

    def _create_group(self, bundles: list[dict[str, float]], chosen: list[dict[str, str]]) -> PlacementGroup:
        name = f"{self.run}:devices{next(self._numbers)}"  # names are unique over all runs
        return placement_group(bundles, name=name, bundle_label_selector=chosen, lifetime=self.lifetime)

    def _find_node(self, group: PlacementGroup) -> int | None:
        """Return the node where a reservation of one bundle is ready; None: it is not, or that node is lost."""
        table = placement_group_table(group)
        if table["state"] != "CREATED":
            return None
        self.update()
        node = self.ids.index(table["bundles_to_node_id"][0])
        return node if node in self.find_living() else None

    def _occupy(self, model: str, group: PlacementGroup, node: int, devices: int) -> ProcessPlacement:
        """Take a reservation that is ready for a process."""
        self._waiting[model].remove(group)
        [domains] = self._list_devices(group, {node: devices})
        names = [name for domain in domains for name in domain]
        placement = ProcessPlacement(node, tuple(names))
        self._single[placement] = group
        return placement

    def _list_devices(self, group: PlacementGroup, used: Mapping[int, int]) -> list[list[Domain]]:
        """Ask in each bundle of a group, one for a node, for the names of its devices."""
        tasks = []
        for bundle, count in enumerate(used.values()):
            request = {"num_gpus": count} if self.resource == "GPU" else {"resources": {self.resource: count}}
            inside = PlacementGroupSchedulingStrategy(group, bundle)
            task = ray.remote(_list_own_devices).options(num_cpus=0, scheduling_strategy=inside, **request)
            tasks.append(task.remote(self.resource))
        try:
            domains: list[list[Domain]] = ray.get(tasks, timeout=LOAD_SECONDS)
        except GetTimeoutError:
            names = ", ".join(self.nodes[node].name for node in used)
            raise RayStoreError(f"Ray started no process on {names} within {LOAD_SECONDS:g} s") from None
        for bundle, (node, count) in enumerate(used.items()):
            if not domains[bundle]:
                first = self._counted[node]
                domains[bundle] = [[str(number) for number in range(first, first + count)]]
                self._counted[node] += count
        return domains

    def _report_mismatches(self, model: str, types: Collection[str]) -> None:
        """Log once that a node has free devices, but of a type on which the model does not compute."""
        for number, node in enumerate(self.update()):
            device_type = self._device_types.get(number)
            if types and node.free and device_type not in types and (model, number) not in self._refused:
                self._refused.add((model, number))
                log.warning(
                    "node %s has %s and is not used for %s, which computes on %s",
                    node.name,
                    device_type or "devices of an unknown kind",
                    model,
                    ", ".join(sorted(types)),
                )


def _is_reachable(node: Mapping[str, Any]) -> bool:
    """Whether a node lives; Ray notices a lost one only after some time."""
    if not node["Alive"]:
        return False
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _list_own_devices(resource: str) -> list[Domain]:
    """The devices that Ray gave the calling task, grouped by NUMA node."""
    names = ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    return group_devices(names, read_nvidia_buses() if resource == "GPU" else {})
