"""Which models share which devices, decided from the configuration alone.

A Slot owns devices: those of one colocation group, or of one model that is in no group. Models of a slot time-share it.
Inside a slot unequal models are packed: with A on 8 devices and B, C on 4 each, B and C lie side by side and run in
parallel, while A excludes both. Nothing here knows Ray or a machine; ``require`` compares a plan with what is there.

Cores are not devices: the operating system shares them among processes, so a CPU model never waits for a core and no
layout of CPU models can dead-lock. The device of a CPU process is a place of its slot, which only orders who computes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from coalign.config.schema import ModelConfig


@dataclass(frozen=True, slots=True)
class Footprint:
    """Processes of one model, and GPUs of each process (0: it computes on CPU)."""

    processes: int
    gpus: int

    @staticmethod
    def of(name: str, config: ModelConfig, spmd: bool) -> Footprint:
        """What a model needs.

        Without ``num_process``: one process per GPU; a model that is not SPMD keeps its tensor-parallel devices in one
        process. Raises ValueError where GPUs do not divide among processes.
        """
        per_process = 1 if spmd else config.tensor_parallel
        processes = config.num_process or max(config.num_gpu // per_process, 1)
        if config.num_gpu % processes:
            raise ValueError(
                f"models.{name}: num_gpu={config.num_gpu} cannot be divided among {processes} processes; "
                f"make it a multiple of num_process (and of tensor_parallel={config.tensor_parallel})"
            )
        return Footprint(processes, config.num_gpu // processes)


@dataclass(frozen=True)
class Slot:
    """Devices and the models on them: ``places[model]`` are the places of its processes, by rank.

    A place is one process's share of devices: ``gpus`` whole GPUs (0: CPU).
    """

    name: str
    size: int
    gpus: int
    places: Mapping[str, tuple[int, ...]]
    footprints: Mapping[str, Footprint]
    _locks: tuple[threading.Lock, ...] = field(repr=False, compare=False)

    def gpus_of(self, model: str) -> int:
        """GPUs of one process of ``model``; 0: it computes on CPU."""
        return self.footprints[model].gpus

    @property
    def sharers(self) -> int:
        """The largest number of processes that hold the same GPUs."""
        used = [place for model, places in self.places.items() if self.gpus_of(model) for place in places]
        return max((used.count(place) for place in set(used)), default=1)

    @contextmanager
    def hold(self, model: str) -> Iterator[None]:
        """Have the model's devices to itself. Places are taken in ascending order: nobody waits in a circle."""
        with ExitStack() as stack:
            for place in sorted(self.places[model]):
                stack.enter_context(self._locks[place])
            yield


def plan(footprints: Mapping[str, Footprint], colocation: Sequence[Sequence[str]]) -> dict[str, Slot]:
    """The slot of each model.

    Raises ValueError for a group that names an unknown model, a model in two groups, and for a group whose processes
    hold different numbers of GPUs.
    """
    slots: dict[str, Slot] = {}
    for group in colocation:
        for name in group:
            if name not in footprints:
                raise ValueError(f"runtime.colocation names '{name}'; the models are {sorted(footprints)}")
            if name in slots:
                raise ValueError(f"runtime.colocation: '{name}' is in two groups; a model lives on one set of devices")
        slot = _slot("+".join(group), {name: footprints[name] for name in group})
        slots |= dict.fromkeys(group, slot)
    alone = [name for name in footprints if name not in slots]
    return slots | {name: _slot(name, {name: footprints[name]}) for name in alone}


def require(slots: Mapping[str, Slot], gpus_per_node: Sequence[int]) -> None:
    """Refuse (ValueError) a plan that the nodes' GPUs can never hold, with what it asks and what is there."""
    distinct = list({id(slot): slot for slot in slots.values()}.values())
    asked = {slot.name: slot.size * slot.gpus for slot in distinct}
    there = f"there are {sum(gpus_per_node)} on {len(gpus_per_node)} node(s)"
    if sum(asked.values()) > sum(gpus_per_node):
        wanted = ", ".join(f"{name}: {number}" for name, number in asked.items() if number)
        raise ValueError(
            f"the models ask for {sum(asked.values())} GPUs ({wanted}); {there}. Lower num_gpu, or let models share "
            "devices with runtime.colocation"
        )
    for slot in distinct:
        if slot.gpus > max(gpus_per_node, default=0):
            raise ValueError(f"one process of {slot.name} asks for {slot.gpus} GPUs on one node; {there}")


def _slot(name: str, members: Mapping[str, Footprint]) -> Slot:
    """Pack members, largest first, each on the places with the fewest tenants."""
    gpus = {footprint.gpus for footprint in members.values()} - {0}
    if len(gpus) > 1:
        raise ValueError(f"runtime.colocation: the processes of {name} hold {sorted(gpus)} GPUs each; make them equal")
    size = max(footprint.processes for footprint in members.values())
    tenants = [0] * size
    places: dict[str, tuple[int, ...]] = {}
    for model, footprint in sorted(members.items(), key=lambda item: -item[1].processes):
        # Neighbouring places, so that the ranks of one model stay on one node where they can.
        starts = range(size - footprint.processes + 1)
        start = min(starts, key=lambda s: (max(tenants[s : s + footprint.processes]), s))
        places[model] = tuple(range(start, start + footprint.processes))
        for place in places[model]:
            tenants[place] += 1
    locks = tuple(threading.Lock() for _ in range(size))
    return Slot(name, size, max(gpus, default=0), places, dict(members), locks)
