"""Describes the placement of a run's models: what the configuration asks for, and what the cluster assigned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.table import Table

import coalign
from coalign.cluster.choice import plan_slots
from coalign.cluster.placement.nodes import Node, ProcessPlacement
from coalign.cluster.placement.slots import Footprint, Slot, list_models_sharing_devices, list_slots
from coalign.cluster.worker import find_wrapper
from coalign.config.schema import ModelConfig, RunConfig
from coalign.hub import find_directory
from coalign.launch.data_load import RunData
from coalign.launch.plan import Plan
from coalign.processes.host import count_processors
from coalign.weights.model_files import read_stored

LISTED = 16  # processes whose devices are listed one by one


def describe_start(plan: Plan, data: RunData) -> list[str]:
    """Say in three lines what begins: recipe and folder; what learns, of which size, on what; rows and steps."""
    config, (main, *_) = plan.config, plan.learning
    runtime, source = config.runtime, main.config
    size = f", {format_count(count)} parameters" if (count := _count_parameters(source)) else ""
    weights = f"{source.load or main.name}{', random weights' if source.init == 'random' else ''}{size}"
    needed = sum(slot.devices for slot in list_slots(plan_slots(plan.started, runtime.colocation)))
    device = f"{needed} devices ({runtime.accelerator})" if needed else f"CPU, {count_processors()} threads"
    rows = f"{data.train.rows:,} rows" if not config.data.stream else "a stream of rows"
    step = f"{runtime.prompts_per_step} prompts × {runtime.samples_per_prompt} samples"
    if plan.recipe.source != "prompts":
        step = f"{runtime.tokens_per_step:,} tokens" if runtime.tokens_per_step else f"{runtime.prompts_per_step} rows"
    return [
        f"coalign {coalign.__version__} · {config.algorithm} · {config.output}",
        f"{main.name}: {weights} · on {device}",
        f"{rows} · {data.steps:,} steps of {step}",
    ]


def _count_parameters(model: ModelConfig) -> int:
    """Count the parameters in the files of a model's weights; 0 where its files do not say."""
    if model.load is None:
        return 0
    return sum(math.prod(tensor.shape) for tensor in (read_stored(find_directory(model.load)) or {}).values())


def describe_requested_layout(models: Mapping[str, ModelConfig], config: RunConfig) -> Table:
    """Describe what each model needs and with which it shares devices. ConfigError for numbers that do not divide."""
    slots = plan_slots(models, config.runtime.colocation)
    needed = sum(slot.devices for slot in list_slots(slots))
    devices = f"{needed} devices ({config.runtime.accelerator})" if needed else "no devices"
    table = Table(box=None, pad_edge=False, title=f"placement: {devices}", title_justify="left")
    for column in ("model", "module", "processes", "shares of a batch", "on", "in turn with"):
        table.add_column(column)
    for name, slot in slots.items():
        needs, model = slot.footprints[name], models[name]
        table.add_row(
            name,
            " around ".join(filter(None, (find_wrapper(model), model.module.rpartition(":")[2]))),
            _processes(needs),
            str(needs.data_parallel_size),
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
        spans = []
        for node, neighbours in groupby(ranks, key=lambda placement: placement.node):
            there = [",".join(placement.devices) for placement in neighbours]
            spans.append(f"{nodes[node].name} " + ("".join(f"[{d}]" for d in there) if there[0] else f"× {len(there)}"))
        turn = f"; in turn with {', '.join(sharing)}" if (sharing := list_models_sharing_devices(slots, name)) else ""
        lines.append(f"{name}: {_processes(slots[name].footprints[name])} on {', '.join(spans)}{turn}")
    return lines


def _processes(needs: Footprint) -> str:
    return f"{needs.processes}" + (f" × {needs.devices}" if needs.devices > 1 else "")


def _places(slot: Slot, name: str) -> str:
    """Return `CPU`, or the slot and its devices, with those of one process joined."""
    if not slot.footprints[name].devices:
        return "CPU"
    positions = slot.positions[name]
    single = [device for devices in positions if len(devices) == 1 for device in devices]
    ranges = [describe_range(single)] if len(single) == len(positions) else [*map(describe_range, positions)]
    devices = " ".join(ranges if len(ranges) <= LISTED else [*ranges[:2], "…", ranges[-1]])
    return f"{slot.name}: {devices}"


def describe_range(numbers: Sequence[int]) -> str:
    """Return the first and the last of neighbouring numbers: `0–7`."""
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def format_count(parameters: float) -> str:
    """Return a number of parameters as people say it: `7.6B`, `135M`."""
    return f"{parameters / 1e9:,.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f}M"
