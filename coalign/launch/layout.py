"""Describes the placement of a run's models: what the configuration asks for, and what the cluster assigned.

Two files of the run folder say it to programs that load no torch (`coalign board`): ``flow.json`` and
``placement.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coalign.cluster.base import Cluster, plan_slots
from coalign.cluster.dry import FlowGraph, describe_graph
from coalign.cluster.placement.nodes import Node, ProcessPlacement
from coalign.cluster.placement.slots import Footprint, Slot, list_slots
from coalign.config.schema import ModelConfig, RunConfig
from coalign.engine.engine import Hook
from coalign.files import Sink, write_text_atomically
from coalign.types import Stats

if TYPE_CHECKING:
    from coalign.cluster.future import BatchRef
    from coalign.engine.engine import Engine

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


def list_models_sharing_devices(slots: Mapping[str, Slot], name: str) -> list[str]:
    """List the models that wait while this one computes."""
    slot = slots[name]
    held = {other: {place for places in ranks for place in places} for other, ranks in slot.places.items()}
    return [other for other in held if other != name and not held[name].isdisjoint(held[other])]


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


def describe_placement(cluster: Cluster) -> dict[str, Any]:
    """Return where each process is, as JSON has it.

    ``nodes`` are their names. ``models`` has for each model its ``processes`` by rank, each [number of the node, names
    of its devices there] (none: it computes on the CPU), and the models that wait while it computes (``in_turn_with``).
    """
    return {
        "nodes": [node.name for node in cluster.nodes],
        "models": {
            name: {
                "processes": [[process.node, list(process.devices)] for process in processes],
                "in_turn_with": list_models_sharing_devices(cluster.slots, name),
            }
            for name, processes in cluster.placements.items()
        },
    }


class StructureRecord(Hook):
    """Writes flow.json when the run begins, and placement.json then and after each step that changed a placement.

    flow.json has the ``algorithm`` and the ``calls`` of one step (coalign.cluster.dry.describe_graph). placement.json
    is the result of ``describe_placement``, with the ``step`` since which it holds.
    """

    def __init__(self, folder: Path, graph: FlowGraph) -> None:
        self.folder = folder
        self.graph = graph
        self._written: dict[str, Any] | None = None
        self._sink = Sink(f"{folder / 'placement.json'}")

    def begin(self, engine: Engine) -> None:
        flow = {"algorithm": engine.config.algorithm, "calls": describe_graph(self.graph)}
        with self._sink.survive():
            write_text_atomically(self.folder / "flow.json", json.dumps(flow))
        self._write_placement(engine)

    def after_step(self, engine: Engine, stats: Stats, batch: BatchRef) -> None:
        self._write_placement(engine)

    def _write_placement(self, engine: Engine) -> None:
        placement = describe_placement(engine.cluster)
        if placement == self._written:
            return
        with self._sink.survive():
            path = self.folder / "placement.json"
            write_text_atomically(path, json.dumps({"step": engine.step, **placement}))
            self._written = placement
