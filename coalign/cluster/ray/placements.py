"""Places processes on the nodes of a Ray cluster: at the start, for a model that grows, and off lost nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coalign.cluster.placement.nodes import Domain, Nodes, NoPlaceError, ProcessPlacement, assign_nodes, place_processes
from coalign.cluster.placement.slots import Footprint, Slot, list_slots, pack_slots
from coalign.cluster.ray.ray_devices import DeviceReservations

RELEASE_SECONDS = 5.0  # how long the devices of a job that has ended may count as used
POLL_SECONDS = 0.2  # between two queries of the free devices
Placements = Mapping[str, Sequence[ProcessPlacement]]  # by model, then rank


class ProcessPlacer:
    """Places the processes of a run, and reserves their devices; waits ``patience`` seconds for devices.

    It does not keep the placements of running processes: they are arguments.
    """

    def __init__(self, devices: DeviceReservations, patience: float) -> None:
        self._devices = devices
        self._patience = patience
        self._spare: dict[str, list[ProcessPlacement]] = {}  # where a model had processes, with devices of this run

    def place(self, slots: list[Slot]) -> dict[str, list[ProcessPlacement]]:
        """Place every process, by model and rank, and reserve the devices. ValueError if there are not enough."""
        return self._reserve(slots, self._assign(slots))

    def place_more(
        self, model: str, needs: Footprint, count: int, separate: bool, placements: Placements
    ) -> list[ProcessPlacement]:
        """Place ``count`` more processes; ``separate`` replicas on devices may get fewer, and the rest wait.

        ValueError without enough devices.
        """
        spare = self._spare.setdefault(model, [])
        living = self._devices.find_living()
        placed = [placement for placement in spare if placement.node in living][: max(0, count)]
        self._spare[model] = [placement for placement in spare if placement not in placed]
        missing = max(0, count - len(placed))
        if needs.devices and separate:
            beside = {placement.node for placement in (*placements[model], *spare)}
            return placed + self._devices.require(model, missing, needs.devices, beside)
        if not missing:
            return placed
        slots = list_slots(pack_slots({model: replace(needs, processes=missing)}, []))
        return placed + self._reserve(slots, self._assign_living(slots, placements))[model]

    def give_back(self, model: str, placement: ProcessPlacement) -> None:
        """Free the devices of a process that has ended; those of the run are kept for the model's next process."""
        if not self._devices.give_back(placement):
            self._spare.setdefault(model, []).append(placement)

    def find_lost_nodes(self, slot: Slot, placements: Placements) -> list[int]:
        """Return the nodes that are lost and on which models of a slot have processes."""
        placed = {placement.node for model in slot.positions for placement in placements[model]}
        return sorted(placed - self._devices.find_living())

    def leave_node(self, node: int, slot: Slot, placements: Placements) -> dict[str, list[ProcessPlacement]]:
        """Move the processes of a slot's models from a lost node to another one; return the new placements by model.

        NoPlaceError if no node has so many free devices.
        """
        placed = [placement for model in slot.positions for placement in placements[model] if placement.node == node]
        devices = sorted({device for placement in placed for device in placement.devices})
        to = self._find_devices(slot, node, devices) if devices else {}
        moved: dict[str, list[ProcessPlacement]] = {}
        for model in slot.positions:
            now = {**placements, **moved}
            moved[model] = [self._move(p, to, now) if p.node == node else p for p in placements[model]]
        return moved

    def _reserve(self, slots: list[Slot], nodes: Mapping[str, Nodes]) -> dict[str, list[ProcessPlacement]]:
        """Reserve the devices of slots on their nodes, and place each process, by model and rank."""
        used = Counter(nodes[slot.name][position] for slot in slots for position in range(slot.devices))
        devices: list[list[Domain]] = [[] for _ in self._devices.nodes]
        if used:
            for node, domains in zip(used, self._devices.reserve(used), strict=True):
                devices[node] = domains
        return place_processes(slots, nodes, devices)

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

    def _assign_living(self, slots: list[Slot], placements: Placements) -> dict[str, Nodes]:
        """The nodes, among living ones, for slots that are added to the running ones."""
        nodes, living = self._devices.update(), sorted(self._devices.find_living())
        busy = Counter(placement.node for ranks in placements.values() for placement in ranks)
        indices = assign_nodes(slots, [replace(nodes[number], processes=busy[number]) for number in living])
        return {name: tuple(living[index] for index in assigned) for name, assigned in indices.items()}

    def _find_devices(self, slot: Slot, lost: int, devices: Sequence[str]) -> dict[str, ProcessPlacement]:
        """Reserve devices on one node for those on a lost one; the new placement of each. Waits for nodes to come.

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

    def _move(
        self, former: ProcessPlacement, to: Mapping[str, ProcessPlacement], placements: Placements
    ) -> ProcessPlacement:
        """The new placement of a process from a lost node: the devices that replace its own, or any node."""
        self._devices.give_back(former)
        if former.devices:
            devices = [to[device] for device in former.devices]
            return ProcessPlacement(devices[0].node, tuple(name for device in devices for name in device.devices))
        [slot] = list_slots(pack_slots({"moved": Footprint(processes=1, devices=0)}, []))
        return ProcessPlacement(self._assign_living([slot], placements)["moved"][0])
