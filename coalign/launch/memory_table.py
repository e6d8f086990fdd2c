"""The memory of a run's models on their devices, as `coalign check` shows it, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table

from coalign.cluster.base import plan_slots
from coalign.cluster.placement.slots import Slot, list_slots
from coalign.config.schema import ModelConfig, RunConfig
from coalign.hub import find_directory
from coalign.launch.plan import Plan
from coalign.planner.gpus import ClusterSpec
from coalign.planner.hf_config import read_directory
from coalign.planner.layouts.devices import DeviceLoad, Estimates, list_device_loads
from coalign.planner.layouts.partition import ModelRole
from coalign.planner.memory import USABLE, MemoryEstimate, Shapes, estimate_memory, read_shapes_of
from coalign.planner.model_size import ModelSize
from coalign.roles import Rollout, Trainable


def find_role(role: type) -> ModelRole:
    """Return the planner's word for a role."""
    if role is Rollout:
        return "rollout"
    return "trainer" if role is Trainable else "scorer"


def find_shapes(model: ModelConfig, size: ModelSize) -> Shapes:
    """Return the shapes of a model's tensors: from its files, or of its architecture where they are not there."""
    if shapes := read_shapes_of(model, size):
        return shapes
    from coalign.backends.pretrained import build_skeleton  # imports transformers

    skeleton = build_skeleton(model.model_copy(update={"lora": None}), packed=False)
    return {name: tuple(weight.shape) for name, weight in skeleton.named_parameters()}


def estimate_models(
    plan: Plan,
    cluster: ClusterSpec | None = None,
    find: Callable[[ModelConfig, ModelSize], Shapes | None] = find_shapes,
) -> dict[str, list[MemoryEstimate]]:
    """Estimate the memory of each model that has weights, on a device of each of its pipeline stages.

    ``find`` returns the shapes of a model's tensors, as exactly as is asked for.
    """
    found = {}
    for model in plan.models.values():
        if (own := model.config).load is not None:
            size = read_directory(find_directory(own.load))
            memory = cluster.memory_bytes if cluster and own.devices else None
            role = find_role(model.role)
            found[model.name] = estimate_memory(own, role, plan.config, size, find(own, size), memory)
    return found


def build_memory_table(estimates: Estimates) -> Table:
    """Build the table of each model's bytes on the fullest of its devices."""
    fullest = {name: max(stages, key=lambda stage: stage.total) for name, stages in estimates.items()}
    unit, size = ("GiB", 2**30) if max((e.total for e in fullest.values()), default=0) >= 2**30 else ("MiB", 2**20)
    table = Table(box=None, pad_edge=False, title=f"memory of one device, {unit}", title_justify="left")
    for column in ("model", "size", "weights", "gradients", "optimizer", "activations", "buffers", "KV", "total"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, e in fullest.items():
        parts = (e.weights, e.gradients, e.optimizer, e.activations, e.buffers, e.cache, e.total)
        table.add_row(name, format_count(e.parameters), *(f"{part / size:,.1f}" for part in parts))
    return table


def list_loads(plan: Plan, estimates: Estimates) -> list[DeviceLoad]:
    """List the different devices of a run, fullest first."""
    slots = plan_slots(plan.started, plan.config.runtime.colocation)
    started = {name: stages for name, stages in estimates.items() if name in plan.started}
    return list_device_loads(list_slots(slots), plan.started, started)


def describe_loads(loads: Sequence[DeviceLoad], slots: Mapping[str, Slot], config: RunConfig) -> Iterator[str]:
    """Yield what the models that share devices take of each at most, and whether `runtime.device_memory` allows it."""
    limit = config.runtime.device_memory
    shared = {slot.name for slot in list_slots(slots) if len(slot.places) > 1}
    seen = set()
    for load in loads:
        if load.slot not in shared or load.slot in seen:
            continue
        seen.add(load.slot)
        more = f" ({format_bytes(load.together)} if nothing left it)" if load.peak < load.together else ""
        yield f"{load.slot} on each device: {format_bytes(load.peak)} at most, when {load.turn} computes{more}"
        if limit is not None and load.peak > limit * 2**30:
            yield f"  more than runtime.device_memory ({limit:g} GiB)"


def build_device_table(loads: Sequence[DeviceLoad], cluster: ClusterSpec) -> Table:
    """Build the table of the devices of a cluster: what each holds at its fullest."""
    table = Table(box=None, pad_edge=False, title="memory of every device", title_justify="left")
    for column in ("devices", "peak", f"of {cluster.gpu.memory_gib:g} GiB", "at the turn of", "hold"):
        is_number = column in ("devices", "peak") or "GiB" in column
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "hold")
    for load in loads:
        share = load.peak / cluster.memory_bytes
        holds = ", ".join(f"{name} stage {stage}" if stage else name for name, stage in load.stages.items())
        table.add_row(f"{load.count:,}", format_bytes(load.peak), f"{share:.0%}", load.turn, holds)
    return table


def find_overload(loads: Sequence[DeviceLoad], cluster: ClusterSpec) -> str | None:
    """Return why the fullest device does not hold its models; None if it does."""
    load, usable = loads[0], USABLE * cluster.memory_bytes
    if load.peak <= usable:
        return None
    own = load.models[load.turn]
    parts = {
        "weights": own.weights,
        "gradients": own.gradients,
        "optimizer": own.optimizer,
        "activations": own.activations,
        "buffers": own.buffers,
        "KV cache": own.cache,
    }
    largest = sorted(parts, key=lambda part: -parts[part])[:2]
    return (
        f"models.{load.turn} does not fit: {format_bytes(load.peak)} on a device, and of the "
        f"{cluster.gpu.memory_gib:g} GiB of an {cluster.gpu.name} {format_bytes(usable)} can be used; largest are "
        + " and ".join(f"its {part} ({format_bytes(parts[part])})" for part in largest)
    )


def format_bytes(number: float) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.0f} MiB"


def format_count(parameters: float) -> str:
    """Return a number of parameters as people say it: `7.6B`, `135M`."""
    return f"{parameters / 1e9:,.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f}M"
