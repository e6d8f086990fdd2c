"""Decides on which node and which devices each process of a run is placed, before anything is reserved.

First each unit (devices that must be on one node) is assigned to a node by the number of free devices. The search is
exact: if there is an assignment it is found, otherwise the run is refused with what it needs and what there is. Once
the devices are reserved and their names are known, each unit gets devices that are close to each other.

Neighbouring ranks communicate most (a tensor-parallel group at every layer). So they get devices of one NUMA node where
it has enough, in the order of the PCI buses: devices behind one switch, with its network card, are neighbours.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from coalign.cluster.placement.slots import Slot


class NoPlaceError(ValueError):
    """No node that lives has devices for a process whose node is lost."""


@dataclass(frozen=True, slots=True)
class _Accelerator:
    """A type of device: torch's name, and the environment variable that makes devices ``visible`` to a process."""

    device: str
    visible: str

    def list_names(self, count: int) -> list[str]:
        """Return the names of this process's ``count`` devices, by which it can show some of them to another process.

        A process that sees some of a machine's devices counts them from 0, and the machine does not.
        """
        shown = os.environ.get(self.visible, "")
        return shown.split(",") if shown else [str(number) for number in range(count)]


STAND_IN = _Accelerator("cpu", "COALIGN_VISIBLE_DEVICES")
ACCELERATORS: Mapping[str, _Accelerator] = {
    "GPU": _Accelerator("cuda", "CUDA_VISIBLE_DEVICES"),
    "NPU": _Accelerator("npu", "ASCEND_RT_VISIBLE_DEVICES"),
    "HPU": _Accelerator("hpu", "HABANA_VISIBLE_MODULES"),
}


DEVICES = {"cuda": "GPU", "rocm": "GPU", "hip": "GPU", "gpu": "GPU", "npu": "NPU", "hpu": "HPU"}
NOT_SUPPORTED = ("xpu", "tpu", "mps", "mlu", "musa")


def find_accelerator(resource: str) -> _Accelerator:
    """The type of device behind a Ray resource; an unknown resource stands for devices on a machine without any.

    ValueError for the name of a device that is no such resource, or that nothing here supports.
    """
    if resource not in ACCELERATORS and (name := resource.lower()) in (*DEVICES, *NOT_SUPPORTED):
        right = f"Ray's name of it is {DEVICES[name]}" if name in DEVICES else f"supported: {', '.join(ACCELERATORS)}"
        raise ValueError(f"is {resource}; {right}")
    return ACCELERATORS.get(resource, STAND_IN)


def find_device_kind(device: str) -> _Accelerator:
    """Return the type of device that torch calls ``device``. ValueError for one that nothing here supports."""
    for accelerator in ACCELERATORS.values():
        if accelerator.device == device:
            return accelerator
    raise ValueError(
        f"{device} devices are not supported; supported: {', '.join(a.device for a in ACCELERATORS.values())}"
    )


PCI = Path("/sys/bus/pci/devices")


def group_devices(names: Sequence[str], buses: Mapping[str, str], pci: Path = PCI) -> list[list[str]]:
    """Group devices by NUMA node, each in the order of the PCI tree; devices that are not known come last.

    ``buses`` gives the PCI address of a device (`0000:3b:00.0`), by any of its names.
    """

    def locate(name: str) -> tuple[int, str]:
        bus = pci / buses.get(name, "unknown")
        if not bus.exists():
            return 1 << 30, ""
        return int((bus / "numa_node").read_text()), str(bus.resolve())

    ordered = sorted(names, key=locate)
    return [list(near) for _, near in groupby(ordered, key=lambda name: locate(name)[0])]


def read_nvidia_buses(ask: Callable[..., str] = subprocess.check_output) -> dict[str, str]:
    """Ask the driver for {index or UUID: PCI address} of the NVIDIA devices; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        lines = ask(command, text=True).splitlines()
    except FileNotFoundError:
        return {}
    buses = {}
    for line in lines:
        index, uuid, bus = (field.strip() for field in line.split(","))
        # Eight digits of the PCI domain there, four in sysfs.
        buses[index] = buses[uuid] = bus.lower()[-12:]
    return buses


LISTED = 8  # nodes that a message lists one by one
Domain = list[str]  # devices of one node that are close to each other, in their order
Nodes = tuple[int, ...]  # the node of each position of a slot


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: its free devices, all its devices, its cores, and the processes of this run on it."""

    name: str
    free: int
    total: int
    cores: float = 1.0
    processes: int = 0


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Where one process is placed: the number of its node, and the names of its devices there (none: on CPU)."""

    node: int
    devices: tuple[str, ...] = ()


def assign_nodes(slots: Sequence[Slot], nodes: Sequence[Node]) -> dict[str, Nodes]:
    """Assign each position of each slot to a node. ValueError if the nodes do not have the devices.

    A process on CPU goes to the node with the fewest processes per core.
    """
    units = _device_units(slots)
    node_of_unit = _fit(units, [node.free for node in nodes])
    if node_of_unit is None:
        raise ValueError(_refusal(slots, units, nodes))
    node_of = {slot.name: [-1] * slot.size for slot in slots}
    load = [node.processes for node in nodes]
    for node, count in Counter(node_of_unit).items():
        load[node] += count
    for slot in slots:
        slot_units = [(unit, node) for unit, node in zip(units, node_of_unit, strict=True) if unit.slot is slot]
        for unit, node in slot_units if slot.spread else _order_neighbours(slot_units):
            for position in unit.positions:
                node_of[slot.name][position] = node
        _place_on_cpu(slot, node_of[slot.name], nodes, load)
    return {name: tuple(assigned) for name, assigned in node_of.items()}


def place_processes(
    slots: Sequence[Slot], nodes: Mapping[str, Nodes], devices: Sequence[Sequence[Domain]]
) -> dict[str, list[ProcessPlacement]]:
    """Place each process, by model and rank. ``devices[node]``: the reserved devices in groups of close ones (domains).

    Large units choose first, each the smallest domain that holds it. If none does, they get the next devices in order.
    """
    left = [[list(domain) for domain in domains] for domains in devices]
    names: dict[tuple[str, int], str] = {}
    for unit in _device_units(slots):
        chosen = _take(left[nodes[unit.slot.name][unit.positions[0]]], unit.size)
        names |= {(unit.slot.name, position): name for position, name in zip(unit.positions, chosen, strict=False)}
    placements: dict[str, list[ProcessPlacement]] = {}
    for slot in slots:
        for model, ranks in slot.positions.items():
            on_device = slot.footprints[model].devices > 0
            placements[model] = [
                ProcessPlacement(
                    nodes[slot.name][positions[0]],
                    tuple(names[slot.name, position] for position in positions) if on_device else (),
                )
                for positions in ranks
            ]
    return placements


@dataclass(frozen=True, slots=True)
class _Unit:
    """Positions of a slot on one node. ``size``: the devices among them; the rest are for CPU processes."""

    slot: Slot
    positions: tuple[int, ...]
    size: int


def _device_units(slots: Sequence[Slot]) -> list[_Unit]:
    """The units with devices, large ones first."""
    units = [
        _Unit(slot, positions, sum(position < slot.devices for position in positions))
        for slot in slots
        for positions in slot.units
        if positions[0] < slot.devices
    ]
    return sorted(units, key=lambda unit: -unit.size)


def _fit(units: Sequence[_Unit], free: list[int]) -> list[int] | None:
    """The node of each unit (largest first), or None if they do not fit: depth first, the most promising node first.

    The rest of a search depends only on how many devices are left, whichever nodes have them, so each dead end is
    searched once. Where each size divides the next larger one, no choice is ever taken back.
    """
    if not _can_hold(units, free):
        return None
    chosen: list[int] = []
    placed = Counter[tuple[str, int]]()  # units of a slot on a node
    rests = _rests(units)
    options: list[Iterator[int]] = []
    dead: set[tuple[int, tuple[int, ...]]] = set()
    while len(chosen) < len(units):
        if len(options) == len(chosen):
            unit, previous = units[len(chosen)], units[len(chosen) - 1]
            last = chosen[-1] if chosen and previous.slot is unit.slot else -1
            options.append(_candidates(unit, rests[len(chosen)], last, placed, free))
        node = next(options[-1], None)
        if node is None:
            dead.add((len(chosen), tuple(sorted(free))))
            options.pop()
            if not chosen:
                return None
            unit, node = units[len(chosen) - 1], chosen.pop()
            free[node] += unit.size
            placed[unit.slot.name, node] -= 1
            continue
        unit = units[len(chosen)]
        free[node] -= unit.size
        if dead and (len(chosen) + 1, tuple(sorted(free))) in dead:
            free[node] += unit.size
        else:
            placed[unit.slot.name, node] += 1
            chosen.append(node)
    return chosen


def _rests(units: Sequence[_Unit]) -> list[int]:
    """For each unit, the devices that its slot still needs, its own included."""
    rests, needed = [], Counter[str]()
    for unit in reversed(units):
        needed[unit.slot.name] += unit.size
        rests.append(needed[unit.slot.name])
    return rests[::-1]


def _order_neighbours(assigned: Sequence[tuple[_Unit, int]]) -> Iterator[tuple[_Unit, int]]:
    """Exchange the nodes of equally large units of one slot, so that neighbouring units are on one node."""
    left = Counter((unit.size, node) for unit, node in assigned)
    unassigned = Counter()
    for unit, node in assigned:
        unassigned[node] += unit.size
    node = -1
    for unit in sorted((unit for unit, _ in assigned), key=lambda unit: unit.positions):
        if not left[unit.size, node]:
            node = min((n for size, n in left.elements() if size == unit.size), key=lambda n: (unassigned[n], n))
        left[unit.size, node] -= 1
        unassigned[node] -= unit.size
        yield unit, node


def _can_hold(units: Sequence[_Unit], free: Sequence[int]) -> bool:
    """Whether the nodes have enough devices for the units, counted in pieces of each unit size.

    A necessary condition; sufficient where the sizes divide each other.
    """
    sizes = Counter(unit.size for unit in units)
    return all(
        sum(count * (size // piece) for size, count in sizes.items()) <= sum(number // piece for number in free)
        for piece in sizes
    )


def _candidates(
    unit: _Unit, rest: int, last: int, placed: Mapping[tuple[str, int], int], free: Sequence[int]
) -> Iterator[int]:
    """The nodes that can hold a unit, the best one first; of equal ones only the first.

    ``rest``: the devices that its slot still needs; ``last``: the node of its neighbour.
    """
    name, size = unit.slot.name, unit.size

    def packed(node: int) -> tuple[bool, bool, int]:
        """A node with units of its slot; else the smallest node for the rest of the slot, or the largest."""
        here = placed[name, node] > 0
        return not here, node != last, free[node] if free[node] >= rest else (1 << 30) - free[node]

    def spread(node: int) -> tuple[int, int]:
        return placed[name, node], -free[node]

    met = set()
    if not unit.slot.spread and last >= 0 and free[last] >= size:  # the best one, without a look at the rest
        met.add(free[last])
        yield last
    fitting = [node for node, number in enumerate(free) if number >= size and number not in met]
    if not met and fitting:  # the rest is sorted only if this one leads nowhere
        best = min(fitting, key=spread if unit.slot.spread else packed)
        met.add(free[best])
        yield best
    for node in sorted(fitting, key=spread if unit.slot.spread else packed):
        if free[node] not in met:
            met.add(free[node])
            yield node


def _place_on_cpu(slot: Slot, node_of: list[int], nodes: Sequence[Node], load: list[int]) -> None:
    """Assign the CPU positions of a slot: each unit to the node with the fewest processes per core."""
    latest: int | None = None
    for positions in slot.units:
        if positions[0] < slot.devices:
            continue
        node = latest
        if node is None or slot.spread:
            node = min(range(len(nodes)), key=lambda n: ((load[n] + len(positions)) / max(nodes[n].cores, 1e-3), n))
        latest = node
        load[node] += len(positions)
        for position in positions:
            node_of[position] = node


def _take(domains: list[Domain], count: int) -> list[str]:
    """Take ``count`` devices out of the domains of a node."""
    fitting = [domain for domain in domains if len(domain) >= count]
    if fitting:
        domain = min(fitting, key=len)
        taken, domain[:] = domain[:count], domain[count:]
        return taken
    return [_take([next(domain for domain in domains if domain)], 1)[0] for _ in range(count)]


def _refusal(slots: Sequence[Slot], units: Sequence[_Unit], nodes: Sequence[Node]) -> str:
    """The message for models that do not fit: what they need, and what there is."""
    asked = {slot.name: slot.devices for slot in slots if slot.devices}
    total, free = sum(node.total for node in nodes), sum(node.free for node in nodes)
    wanted = ", ".join(f"{name}: {number}" for name, number in asked.items())
    there = f"there are {total} on {len(nodes)} node(s)"
    if free < total:
        by_node = _list_nodes({node.name: f"{node.free} of {node.total}" for node in nodes if node.total})
        there += f", of which other jobs leave {free} free ({by_node})"
    if sum(asked.values()) > free:
        return (
            f"the models ask for {sum(asked.values())} devices ({wanted}); {there}. Lower num_gpu, or let models share "
            "devices with runtime.colocation"
        )
    together = Counter((unit.slot.name, unit.size) for unit in units if unit.size > 1)
    pieces = ", ".join(f"{name}: {count} × {size}" for (name, size), count in together.items())
    per_node = _list_nodes({node.name: str(node.free) for node in nodes if node.free})
    return (
        f"the models ask for {sum(asked.values())} devices ({wanted}), some of which have to be on one node "
        f"({pieces}), and the nodes cannot hold them ({per_node}). Lower tensor_parallel or pipeline_parallel"
    )


def _list_nodes(texts: Mapping[str, str]) -> str:
    """List what each node has; for many nodes, how many have the same."""
    if len(texts) <= LISTED:
        return ", ".join(f"{name}: {text}" for name, text in texts.items())
    return ", ".join(f"{count} nodes: {text} each" for text, count in Counter(texts.values()).items())
