"""Finds what every device of a placement holds, and with which active model it holds the most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coalign.cluster.placement.slots import Slot, list_movable_parts
from coalign.config.schema import ModelConfig
from coalign_plan.memory import PROCESS_BYTES, MemoryEstimate, estimate_largest_phase, measure_turn

Estimates = Mapping[str, Sequence[MemoryEstimate]]  # model -> one estimate for each pipeline stage


@dataclass(frozen=True)
class DeviceLoad:
    """``count`` devices of a slot that hold the same parts of the same models.

    ``first``: the number of the first of them in its slot. ``stages``: the pipeline stage of each model. ``peak``:
    bytes while the model ``turn`` is active; ``together``: what it would be if nothing left the device.
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
    slots: Iterable[Slot], models: Mapping[str, ModelConfig], estimates: Estimates
) -> list[DeviceLoad]:
    """List the different devices of all slots, fullest first."""
    loads = []
    for slot in slots:
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for position, stages in _list_stages(slot, models, estimates).items():
            groups.setdefault(stages, []).append(position)
        for stages, positions in groups.items():
            held = {name: estimates[name][stage] for name, stage in stages}
            moved = {
                name: list_movable_parts(models[name], slot.footprints[name].devices, len(slot.positions) > 1)
                for name in held
            }
            more = PROCESS_BYTES * len(held) if slot.devices else 0
            peaks = {name: measure_turn(name, held, moved) for name in held}
            turn = max(peaks, key=lambda name: peaks[name])
            together = estimate_largest_phase(held, {}) + more
            peak, first = peaks[turn] + more, positions[0]
            loads.append(DeviceLoad(slot.name, first, len(positions), dict(stages), held, peak, turn, together))
    return sorted(loads, key=lambda load: -load.peak)


def _list_stages(
    slot: Slot, models: Mapping[str, ModelConfig], estimates: Estimates
) -> dict[int, tuple[tuple[str, int], ...]]:
    """Return by position in a slot the models on it, each with its pipeline stage there."""
    by_position: dict[int, list[tuple[str, int]]] = {}
    for name, ranks in slot.positions.items():
        if name not in estimates:
            continue
        stages, model = len(estimates[name]), models[name]
        for rank, positions in enumerate(ranks):
            for index, position in enumerate(positions):
                # Stages vary slowest in a process group; an engine's devices are stages of tensor-parallel groups.
                stage = index // model.tensor_parallel if len(positions) > 1 else rank * stages // len(ranks)
                by_position.setdefault(position, []).append((name, stage))
    return {position: tuple(models_here) for position, models_here in by_position.items()}
