"""Finds places for processes on the nodes of a Ray cluster: at the start, for a model that grows, off lost nodes."""

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
Placements = Mapping[str, Sequence[ProcessPlacement]]  # of each model's processes


class ProcessPlacer:
    """Finds places for the processes of a run, and reserves their devices; waits ``patience`` seconds for devices.

    It does not keep where processes are: ``placements`` of those that run are arguments.
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
        """Find places for ``count`` more processes; for ``separate`` replicas on devices perhaps fewer, and the others
        wait. ValueError without enough devices."""
        spare = self._spare.setdefault(model, [])
        living = self._devices.find_living()
        found = [placement for placement in spare if placement.node in living][: max(0, count)]
        self._spare[model] = [placement for placement in spare if placement not in found]
        missing = max(0, count - len(found))
        if needs.devices and separate:
            beside = {placement.node for placement in (*placements[model], *spare)}
            return found + self._devices.require(model, missing, needs.devices, beside)
        if not missing:
            return found
        slots = list_slots(pack_slots({model: replace(needs, processes=missing)}, []))
        return found + self._reserve(slots, self._assign_living(slots, placements))[model]

    def give_back(self, model: str, placement: ProcessPlacement) -> None:
        """Free the place of a process that has ended; devices of the run are kept for the model's next process."""
        if not self._devices.give_back(placement):
            self._spare.setdefault(model, []).append(placement)

    def find_lost_nodes(self, slot: Slot, placements: Placements) -> list[int]:
        """Return the nodes that are lost and on which models of a slot have processes."""
        placed = {placement.node for model in slot.places for placement in placements[model]}
        return sorted(placed - self._devices.find_living())

    def leave_node(self, node: int, slot: Slot, placements: Placements) -> dict[str, list[ProcessPlacement]]:
        """Place what the models of a slot had on a lost node on another one, all together; return where they are now.

        NoPlaceError if no node has so many free devices.
        """
        placed = [each for model in slot.places for each in placements[model] if each.node == node]
        devices = sorted({device for each in placed for device in each.devices})
        to = self._find_devices(slot, node, devices) if devices else {}
        moved: dict[str, list[ProcessPlacement]] = {}
        for model in slot.places:
            now = {**placements, **moved}
            moved[model] = [self._move(each, to, now) if each.node == node else each for each in placements[model]]
        return moved

    def _reserve(self, slots: list[Slot], where: Mapping[str, Nodes]) -> dict[str, list[ProcessPlacement]]:
        """Reserve the devices of slots on their nodes, and place each process, by model and rank."""
        used = Counter(where[slot.name][place] for slot in slots for place in range(slot.devices))
        devices: list[list[Domain]] = [[] for _ in self._devices.nodes]
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

    def _assign_living(self, slots: list[Slot], placements: Placements) -> dict[str, Nodes]:
        """The nodes of slots that come to those that run, among nodes that live."""
        nodes, living = self._devices.update(), sorted(self._devices.find_living())
        busy = Counter(placement.node for ranks in placements.values() for placement in ranks)
        where = assign_nodes(slots, [replace(nodes[number], processes=busy[number]) for number in living])
        return {name: tuple(living[place] for place in places) for name, places in where.items()}

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

    def _move(
        self, before: ProcessPlacement, to: Mapping[str, ProcessPlacement], placements: Placements
    ) -> ProcessPlacement:
        """Where a process goes that was on a lost node: to devices in place of its own, or to any node."""
        self._devices.give_back(before)
        if before.devices:
            found = [to[device] for device in before.devices]
            return ProcessPlacement(found[0].node, tuple(device for each in found for device in each.devices))
        [slot] = list_slots(pack_slots({"moved": Footprint(processes=1, devices=0)}, []))
        return ProcessPlacement(self._assign_living([slot], placements)["moved"][0])
