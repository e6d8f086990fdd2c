"""Which models share which devices, decided from the configuration alone.

A Slot has the devices of one colocation group, or of one model that is in no group. The models of a slot share its
devices in time. With A on 8 devices and B and C on 4 each, B and C get different devices and run in parallel, while A
runs alone. The positions of a slot are numbers from 0; coalign.cluster.placement.nodes finds devices for them.

CPU cores are not reserved: the operating system shares them, so no layout of CPU models can dead-lock. The position of
a CPU process only decides which processes run one after the other, and, beside a device model of its group, on which
node.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import ModelConfig

# The settings that divide the ranks of a trained model: for rows, and for experts.
ROWS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "dp_replicate")
EXPERTS = ("expert_parallel", "dp_replicate")
MOVABLE = ("weights", "gradients", "optimizer", "kv")  # coalign.memory.PARTS, which needs torch


@dataclass(frozen=True, slots=True)
class Footprint:
    """The processes of one model, and the devices of each process (0: it computes on CPU).

    ``together``: neighbouring ranks that need one node and get the same data, as a tensor-parallel group. ``alike``:
    groups of ``together`` ranks that get the same data, on any nodes. ``spread``: over many nodes rather than few
    (None: either).
    """

    processes: int
    devices: int
    together: int = 1
    spread: bool | None = None
    alike: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Shards of a batch."""
        return self.processes // (self.together * self.alike)

    @property
    def positions(self) -> int:
        """Positions of each process in its slot: one for each device, one on CPU."""
        return max(self.devices, 1)

    @property
    def total(self) -> int:
        """Devices of all its processes."""
        return self.processes * self.devices

    @staticmethod
    def of(name: str, config: ModelConfig, spmd: bool) -> Footprint:
        """The footprint of a model by its configuration. ConfigError where the numbers do not divide.

        The processes of an SPMD model are its ranks, one per device. Any other model has num_gpu / (tensor_parallel ×
        pipeline_parallel) replicas, one process each. ``num_process`` overrides both.
        """
        per_process = 1 if spmd else config.tensor_parallel * config.pipeline_parallel
        processes = config.num_process or max(config.devices // per_process, 1)
        key = ("models", name, "num_process")
        for needed in (ROWS, EXPERTS) if spmd else ():
            ways = {way: getattr(config, way) for way in needed if getattr(config, way) > 1}
            if processes % prod(ways.values()):
                product = f"{' × '.join(ways)} = {' × '.join(map(str, ways.values()))}"
                raise ConfigError([ConfigProblem(key, f"is {processes}; expected a multiple of {product}")])
        if config.devices % (processes * (per_process if config.devices else 1)):
            per_replica = f", {per_process} for each" if per_process > 1 else ""
            raise ConfigError(
                [ConfigProblem(key, f"is {processes}; num_gpu={config.devices} does not divide by it{per_replica}")]
            )
        spread = None if config.placement is None else config.placement == "spread"
        together = config.tensor_parallel if spmd else 1
        alike = config.context_parallel * config.pipeline_parallel if spmd else 1
        return Footprint(processes, config.devices // processes, together, spread, alike)


@dataclass(frozen=True)
class Slot:
    """Positions that models share: ``positions[model]`` are those of its processes, by rank.

    The first ``devices`` positions are devices, the rest are for CPU processes. Each of the ``units`` must be on one
    node (the devices of a process or of a tensor-parallel group); together they cover the slot.
    """

    name: str
    size: int
    devices: int
    positions: Mapping[str, tuple[tuple[int, ...], ...]]
    units: tuple[tuple[int, ...], ...]
    footprints: Mapping[str, Footprint]
    _locks: tuple[threading.Lock, ...] = field(repr=False, compare=False)

    @property
    def spread(self) -> bool:
        """Whether to use many nodes. The default for CPU models, which need many cores."""
        wishes = {footprint.spread for footprint in self.footprints.values() if footprint.spread is not None}
        return wishes.pop() if wishes else self.devices == 0

    @contextmanager
    def hold(self, *models: str) -> Iterator[None]:
        """Reserve the models' positions. Locks are taken in ascending order, so there is no dead-lock."""
        with ExitStack() as stack:
            for position in sorted({p for model in models for positions in self.positions[model] for p in positions}):
                stack.enter_context(self._locks[position])
            yield


def pack_slots(footprints: Mapping[str, Footprint], colocation: Sequence[Sequence[str]]) -> dict[str, Slot]:
    """The slot of each model. ConfigError for a group of which some models are to be packed and others spread.

    The schema has checked that groups name models, and none twice. Models that do not run (not in ``footprints``) take
    no position.
    """
    slots: dict[str, Slot] = {}
    for index, group in enumerate(colocation):
        members = {name: footprints[name] for name in group if name in footprints}
        wishes = [name for name in members if members[name].spread is not None]
        for first, second in pairwise(wishes):
            if members[first].spread != members[second].spread:
                message = f"'{first}' and '{second}' share devices, and only one of them asks for `placement: spread`"
                raise ConfigError([ConfigProblem(("runtime", "colocation", index), message)])
        if members:
            slots |= dict.fromkeys(members, _slot("+".join(members), members))
    alone = [name for name in footprints if name not in slots]
    return slots | {name: _slot(name, {name: footprints[name]}) for name in alone}


def list_slots(slots: Mapping[str, Slot]) -> list[Slot]:
    """Each slot once, in the order of the models."""
    return list({id(slot): slot for slot in slots.values()}.values())


def list_models_sharing_devices(slots: Mapping[str, Slot], name: str) -> list[str]:
    """List the models that wait while this one computes."""
    slot = slots[name]
    held = {model: {p for positions in ranks for p in positions} for model, ranks in slot.positions.items()}
    return [model for model in held if model != name and not held[name].isdisjoint(held[model])]


def list_movable_parts(config: ModelConfig, devices: int, colocated: bool) -> frozenset[str]:
    """The components that may leave the ``devices`` of each process of a model."""
    if config.offload != "auto":
        return frozenset(config.offload)
    return frozenset(MOVABLE) if devices and colocated else frozenset()


def _slot(name: str, members: Mapping[str, Footprint]) -> Slot:
    """Pack the members: device models first, large before small ones, each where the fewest models are."""
    devices = max(footprint.total for footprint in members.values())
    size = max(footprint.processes * footprint.positions for footprint in members.values())
    packed = _Packed(models=[0] * size, unit=list(range(size)))
    positions: dict[str, tuple[tuple[int, ...], ...]] = {}
    for model, footprint in sorted(members.items(), key=lambda item: (-item[1].total, -item[1].positions)):
        positions[model] = packed.add(footprint, limit=devices if footprint.devices else size)
    units: dict[int, list[int]] = {}
    for position, unit in enumerate(packed.unit):  # a unit is named by its first position, so they come in order
        units.setdefault(unit, []).append(position)
    locks = tuple(threading.Lock() for _ in range(size))
    grouped = tuple(map(tuple, units.values()))
    return Slot(name, size, devices, {model: positions[model] for model in members}, grouped, dict(members), locks)


@dataclass(slots=True)
class _Packed:
    """The number of models on each position, and the unit of each position (named by the unit's first position)."""

    models: list[int]
    unit: list[int]

    def add(self, footprint: Footprint, limit: int) -> tuple[tuple[int, ...], ...]:
        """Add a model; the positions of its processes, which are neighbours below ``limit``.

        Best are positions that make no unit larger (it would need a larger node), then those with the fewest models.
        """
        size, wide = footprint.processes * footprint.positions, footprint.positions * footprint.together
        sizes = Counter(self.unit)
        # How many windows of ``wide`` positions, from each position on in steps of ``wide``, would make a unit larger.
        enlarged = [0] * (limit + wide)
        for first in range(limit - wide, -1, -1) if wide > 1 else ():
            window = {unit if sizes[unit] > 1 else -1 for unit in self.unit[first : first + wide]}
            enlarged[first] = enlarged[first + wide] + (len(window) > 1)

        def cost(start: int) -> tuple[int, int, int]:
            return enlarged[start] - enlarged[start + size], max(self.models[start : start + size]), start

        start = min(range(limit - size + 1), key=cost)
        for first in range(start, start + size, wide) if wide > 1 else ():
            units = set(self.unit[first : first + wide])
            if len(units) > 1:
                self.unit = [min(units) if unit in units else unit for unit in self.unit]
        for position in range(start, start + size):
            self.models[position] += 1
        firsts = range(start, start + size, footprint.positions)
        return tuple(tuple(range(first, first + footprint.positions)) for first in firsts)
