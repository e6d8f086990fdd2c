"""Describes the placement of a run's models: what the configuration asks for, and what the cluster assigned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.table import Table

from coalign.cluster.base import plan_slots
from coalign.cluster.placement.nodes import Node, ProcessPlacement
from coalign.cluster.placement.slots import Footprint, Slot, list_models_sharing_devices, list_slots
from coalign.config.schema import ModelConfig, RunConfig

LISTED = 16  # processes whose devices are listed one by one


def describe_requested_layout(models: Mapping[str, ModelConfig], config: RunConfig) -> Table:
    """Describe what each model needs and with which it shares devices. ConfigError for numbers that do not divide."""
    slots = plan_slots(models, config.runtime.colocation)
    needed = sum(slot.devices for slot in list_slots(slots))
    devices = f"{needed} devices ({config.runtime.accelerator})" if needed else "no devices"
    table = Table(box=None, pad_edge=False, title=f"placement: {devices}", title_justify="left")
    for column in ("model", "processes", "shares of a batch", "on", "in turn with"):
        table.add_column(column)
    for name, slot in slots.items():
        needs = slot.footprints[name]
        table.add_row(
            name,
            _processes(needs),
            str(needs.parts),
            _places(slot, name),
            ", ".join(list_models_sharing_devices(slots, name)),
        )
    return table


def describe_assigned_layout(
    slots: Mapping[str, Slot], placements: Mapping[str, Sequence[ProcessPlacement]], nodes: Sequence[Node]
) -> list[str]:
    """Return a line for each model: where its processes are, by rank."""
    lines = []
    for name, ranks in placements.items():
        where = []
        for node, neighbours in groupby(ranks, key=lambda placement: placement.node):
            there = [",".join(placement.devices) for placement in neighbours]
            where.append(f"{nodes[node].name} " + ("".join(f"[{d}]" for d in there) if there[0] else f"× {len(there)}"))
        turn = f"; in turn with {', '.join(others)}" if (others := list_models_sharing_devices(slots, name)) else ""
        lines.append(f"{name}: {_processes(slots[name].footprints[name])} on {', '.join(where)}{turn}")
    return lines


def _processes(needs: Footprint) -> str:
    return f"{needs.processes}" + (f" × {needs.devices}" if needs.devices > 1 else "")


def _places(slot: Slot, name: str) -> str:
    """Return `CPU`, or the slot and its devices, with those of one process joined."""
    if not slot.footprints[name].devices:
        return "CPU"
    own = slot.places[name]
    single = [device for devices in own if len(devices) == 1 for device in devices]
    ranges = [describe_range(single)] if len(single) == len(own) else [*map(describe_range, own)]
    devices = " ".join(ranges if len(ranges) <= LISTED else [*ranges[:2], "…", ranges[-1]])
    return f"{slot.name}: {devices}"


def describe_range(numbers: Sequence[int]) -> str:
    """Return the first and the last of neighbouring numbers: `0–7`."""
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
