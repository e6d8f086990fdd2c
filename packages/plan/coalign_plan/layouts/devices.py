"""Finds what every device of a placement holds, and which models' turns take the most of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coalign.cluster.placement.slots import Slot, list_movable_parts
from coalign.config.schema import ModelConfig
from coalign_plan.memory import PROCESS_BYTES, MemoryEstimate, estimate_largest_phase, measure_turn

Estimates = Mapping[str, Sequence[MemoryEstimate]]  # by model, of each pipeline stage


@dataclass(frozen=True)
class DeviceLoad:
    """``count`` devices of a slot that hold the same parts of the same models.

    ``first``: the number of the first of them in its slot. ``stages``: the pipeline stage of each model. ``peak``:
    bytes at the turn of the model ``turn``; ``together``: what it would be if nothing left the device.
    """

    slot: str
    first: int
    count: int
    stages: Mapping[str, int]
    models: Mapping[str, MemoryEstimate]
    peak: int
    turn: str
    together: int


def list_device_loads(
    slots: Iterable[Slot], models: Mapping[str, ModelConfig], estimates: Estimates, *, overhead: int = PROCESS_BYTES
) -> list[DeviceLoad]:
    """List the different devices of all slots, fullest first. ``overhead``: bytes of each process beside its model."""
    loads = []
    for slot in slots:
        found: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for place, here in _list_stages(slot, models, estimates).items():
            found.setdefault(here, []).append(place)
        for here, places in found.items():
            own = {name: estimates[name][stage] for name, stage in here}
            moved = {
                name: list_movable_parts(models[name], slot.footprints[name].devices, len(slot.positions) > 1)
                for name in own
            }
            more = overhead * len(own) if slot.devices else 0
            peaks = {name: measure_turn(name, own, moved) for name in own}
            turn = max(peaks, key=lambda name: peaks[name])
            together = estimate_largest_phase(own, {}) + more
            loads.append(
                DeviceLoad(slot.name, places[0], len(places), dict(here), own, peaks[turn] + more, turn, together)
            )
    return sorted(loads, key=lambda load: -load.peak)


def _list_stages(
    slot: Slot, models: Mapping[str, ModelConfig], estimates: Estimates
) -> dict[int, tuple[tuple[str, int], ...]]:
    """Return the models on each place of a slot, with the pipeline stage that is there."""
    here: dict[int, list[tuple[str, int]]] = {}
    for name, ranks in slot.positions.items():
        if name not in estimates:
            continue
        stages, own = len(estimates[name]), models[name]
        for rank, places in enumerate(ranks):
            for index, place in enumerate(places):
                # Of a process group, stages vary slowest; an engine's devices are stages of tensor-parallel groups.
                stage = index // own.tensor_parallel if len(places) > 1 else rank * stages // len(ranks)
                here.setdefault(place, []).append((name, stage))
    return {place: tuple(found) for place, found in here.items()}
