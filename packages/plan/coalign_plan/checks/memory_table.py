"""The memory of a run's models on their devices, as `coalign check` shows it, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from coalign.cluster.choice import choose_cluster, plan_slots
from coalign.cluster.placement.nodes import find_accelerator
from coalign.cluster.placement.slots import Slot, list_slots
from coalign.config.schema import ModelConfig, RunConfig
from coalign.devices import count_devices, measure_memory
from coalign.hub import find_directory
from coalign.launch.check import RowLengths
from coalign.launch.layout import format_count
from coalign.launch.plan import Plan, PlannedModel
from coalign.roles import Rollout, Trainable
from coalign_plan.hf_config import read_directory
from coalign_plan.layouts.devices import DeviceLoad, Estimates, list_device_loads
from coalign_plan.layouts.partition import ModelRole, find_partition
from coalign_plan.memory import (
    HOST_PROCESS_BYTES,
    LAYER,
    USABLE,
    MemoryEstimate,
    Shapes,
    estimate_memory,
    read_shapes_of,
)
from coalign_plan.model_size import ModelSize

if TYPE_CHECKING:
    from coalign_plan.gpus import ClusterSpec


@dataclass(frozen=True)
class MemoryDemand:
    """Bytes of a memory of this machine that a run takes by the estimate, and how many there are."""

    memory: str
    bytes: int
    there: int

    @property
    def usable(self) -> float:
        return USABLE * self.there

    def __str__(self) -> str:
        return f"{self.memory}: {format_bytes(self.bytes)} at most, of {format_bytes(self.there)} on this machine"


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
    lengths: RowLengths | None = None,
) -> dict[str, list[MemoryEstimate]]:
    """Estimate the memory of each model that has weights, on a device of each of its pipeline stages.

    ``find`` returns the shapes of a model's tensors. Without the ``lengths`` of the rows a micro-batch counts as full,
    and a prompt as long as it may be.
    """
    estimates = {}
    for model in plan.models.values():
        if (settings := model.config).load is not None:
            size = read_directory(find_directory(settings.load))
            shapes = find(settings, size)
            memory = cluster.memory_bytes if cluster and settings.devices else None
            config = plan.config
            if lengths is not None:
                micro = _count_micro(plan, model, lengths, shapes)
                settings = settings.model_copy(update={"max_tokens_per_micro": micro})
                prompt = {"max_prompt_tokens": min(lengths.sequence, config.data.max_prompt_tokens)}
                config = config.model_copy(update={"data": config.data.model_copy(update=prompt)})
            estimates[model.name] = estimate_memory(settings, find_role(model.role), config, size, shapes, memory)
    return estimates


def _count_micro(plan: Plan, model: PlannedModel, lengths: RowLengths, shapes: Shapes | None) -> int | None:
    """Count the tokens that a micro-batch of a model can have at most; None: nothing bounds it."""
    config, (longest, step) = model.config, _count_step(plan, lengths, model.config.share_prefix)
    per = "token" if model.objective is None else model.objective.per
    if per == "batch":  # which no limit cuts
        return step
    if per == "group":
        longest = lengths.row if plan.recipe.source != "prompts" else longest * plan.compared
    shards = find_partition(config, find_role(model.role)).data
    if step is not None and (shares := shards * (config.updates_per_batch if model.role is Trainable else 1)) > 1:
        step = min(step, step // shares + longest)  # shares differ by less than what cannot be cut
    device = find_accelerator(plan.config.runtime.accelerator).device if config.devices else "cpu"
    widest = max((shape[0] for name, shape in (shapes or {}).items() if LAYER.search(name)), default=1)
    limit = model.module.limit_micro(config, device, longest=longest, widest=widest)
    return min((bound for bound in (step, limit) if bound is not None), default=None)


def _count_step(plan: Plan, lengths: RowLengths, shares: bool) -> tuple[int, int | None]:
    """Count the most tokens of a sequence, and of all that a step computes; None if nobody knows.

    ``shares``: samples of a prompt share its tokens.
    """
    config, runtime = plan.config, plan.config.runtime
    if plan.recipe.source != "prompts":
        rows = runtime.prompts_per_step * lengths.row
        return lengths.sequence, rows if runtime.tokens_per_step is None else runtime.tokens_per_step + lengths.row
    policies = [model for model in plan.models.values() if model.role is Rollout]
    limit = min((policy.context.sample_tokens or 2**31 for policy in policies), default=2**31)
    if config.rollout.has_episodes:  # an episode has as many turns as fit
        return limit, None
    response = max((policy.config.sampling.max_new_tokens for policy in policies), default=0)
    longest = min(lengths.sequence + response, limit)
    further = min(response, longest) if shares else longest
    step = runtime.prompts_per_step * (longest + (runtime.samples_per_prompt - 1) * further)
    return longest, None if config.replay else step  # earlier batches are trained on, too


def list_demands(plan: Plan, estimates: Estimates, loads: Sequence[DeviceLoad]) -> list[MemoryDemand]:
    """List what the run takes of this machine's memories; of a cluster that it joins nobody knows them."""
    config = plan.config
    if config.runtime.ray_address:
        return []
    demands = []
    device_type = find_accelerator(config.runtime.accelerator).device
    used = [load for load in loads if load.models and plan.started[load.turn].devices]
    if used and count_devices(device_type):
        demands.append(MemoryDemand(f"memory of a device ({device_type})", used[0].peak, measure_memory(device_type)))
    return [*demands, MemoryDemand("host memory", _count_host(plan, estimates), measure_memory("cpu"))]


def _count_host(plan: Plan, estimates: Estimates) -> int:
    """Count the bytes of host memory: models on the CPU, what other models offload, and processes.

    In one process models compute in turn; each process of Ray keeps the memory that it has had.
    """
    kept, working, processes = 0, [0], 1
    for name, model in plan.started.items():
        for stage in estimates.get(name, ()):
            ranks = model.processes // len(estimates[name])
            processes += ranks
            kept += ranks * stage.host
            if not model.devices:
                passing = stage.activations + stage.buffers
                kept += ranks * (stage.total - passing)
                working.append(ranks * passing)
    if choose_cluster(plan.config) == "local":
        return kept + max(working) + HOST_PROCESS_BYTES
    return kept + sum(working) + processes * HOST_PROCESS_BYTES


def describe_excess(demands: Sequence[MemoryDemand]) -> str:
    """Say that a run does not fit this machine, and what makes it smaller."""
    what = " and ".join(
        f"{demand.memory}: {format_bytes(demand.bytes)}, and {format_bytes(demand.usable)} can be used"
        for demand in demands
    )
    return (
        f"by this estimate the run does not fit this machine ({what}); smaller is what has a lower "
        "models.*.max_tokens_per_micro, runtime.prompts_per_step or sampling.max_new_tokens, models.trainer.lora, or "
        "activation_checkpointing"
    )


def build_memory_table(estimates: Estimates) -> Table:
    """Build the table of each model's bytes on the fullest of its devices."""
    fullest = {name: max(stages, key=lambda stage: stage.total) for name, stages in estimates.items()}
    unit, size = ("GiB", 2**30) if max((e.total for e in fullest.values()), default=0) >= 2**30 else ("MiB", 2**20)
    table = Table(box=None, pad_edge=False, title=f"memory of one device, {unit}", title_justify="left")
    for column in ("model", "size", "weights", "gradients", "optimizer", "activations", "buffers", "KV", "total"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for name, e in fullest.items():
        components = (e.weights, e.gradients, e.optimizer, e.activations, e.buffers, e.cache, e.total)
        table.add_row(name, format_count(e.parameters), *(f"{component / size:,.1f}" for component in components))
    return table


def list_memory_facts(estimates: Estimates) -> dict[str, list[dict[str, int]]]:
    """Return the bytes of each model on a device of each of its pipeline stages, as JSON has them."""
    return {name: [asdict(stage) | {"total": stage.total} for stage in stages] for name, stages in estimates.items()}


def list_loads(plan: Plan, estimates: Estimates) -> list[DeviceLoad]:
    """List the different devices of a run, fullest first."""
    slots = plan_slots(plan.started, plan.config.runtime.colocation)
    started = {name: stages for name, stages in estimates.items() if name in plan.started}
    return list_device_loads(list_slots(slots), plan.started, started)


def describe_loads(loads: Sequence[DeviceLoad], slots: Mapping[str, Slot], config: RunConfig) -> Iterator[str]:
    """Yield what the models that share devices take of each at most, and whether `runtime.device_memory` allows it."""
    limit = config.runtime.device_memory
    shared = {slot.name for slot in list_slots(slots) if len(slot.positions) > 1}
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
    estimate = load.models[load.turn]
    components = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "activations": estimate.activations,
        "buffers": estimate.buffers,
        "KV cache": estimate.cache,
    }
    largest = sorted(components, key=lambda name: -components[name])[:2]
    return (
        f"models.{load.turn} does not fit: {format_bytes(load.peak)} on a device, and of the "
        f"{cluster.gpu.memory_gib:g} GiB of an {cluster.gpu.name} {format_bytes(usable)} can be used; largest are "
        + " and ".join(f"its {name} ({format_bytes(components[name])})" for name in largest)
    )


def format_bytes(number: float) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.0f} MiB"
