"""Lists the layouts that one model could have on a number of devices, and sorts out those that no device can hold.

What a backend cannot compute it refuses itself (Module.check_settings, check_architecture): the search asks it for
those that are left. Here is only what a search would never want to try.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coalign.config.schema import ModelConfig, Section
from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.job import JobShape
from coalign_plan.layouts.adapter import PlannedRun, RunModel, build_work
from coalign_plan.memory import MemoryEstimate, estimate_memory
from coalign_plan.prediction import predict_step

Settings = Mapping[str, Any]  # dotted key of a model -> value
Refusal = Callable[[str, ModelConfig], str | None]  # a backend's own word on settings of the model of this name
STEPS_OF_TOKENS = 1024  # to which token limits are rounded up
LARGEST_MICRO_BATCH = 32768  # tokens
ENGINE_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # gpu_memory_utilization
# What varies for one cut; what a device holds grows and shrinks with it.
VARIED = ("activation_checkpointing", "max_tokens_per_micro", "vllm.gpu_memory_utilization")
ZERO = ("deepspeed.stage",)
LONG_ROW = 8192  # tokens of a row that context parallelism is tried for


@dataclass(frozen=True)
class ModelLayout:
    """A layout of one model: what differs from its settings, its estimates by stage, and its work in a step.

    ``seconds``: a step in which this model alone computes.
    """

    settings: Settings
    config: ModelConfig
    estimates: Sequence[MemoryEstimate]
    seconds: float

    @property
    def bytes(self) -> int:
        return max(estimate.total for estimate in self.estimates)


@dataclass
class RejectedLayouts:
    """Why layouts were left out: how many, by model and reason.

    ``smallest``: by model the layout that lacks the least memory, as (bytes it needs, bytes it has, settings).
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    smallest: dict[str, tuple[float, float, Settings]] = field(default_factory=dict)

    def add(self, model: str, reason: str) -> None:
        self.counts[model, reason] += 1

    def add_too_large(self, model: str, needed: float, budget: float, settings: Settings) -> None:
        self.counts[model, "memory"] += 1
        if model not in self.smallest or needed - budget < self.smallest[model][0] - self.smallest[model][1]:
            self.smallest[model] = needed, budget, settings


def apply_settings(model: ModelConfig, settings: Settings) -> ModelConfig:
    """Return a model with other settings; dotted keys name those of a section."""
    update: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, inner = key.partition(".")
        if not inner:
            update[section] = value
            continue
        old = update.get(section, getattr(model, section))
        update[section] = old | {inner: value} if isinstance(old, dict) else old.model_copy(update={inner: value})
    return model.model_copy(update=update)


def list_settings(
    run: PlannedRun, model: RunModel, gpus: int, cluster: ClusterSpec, supported: Sequence[str]
) -> Iterator[Settings]:
    """Yield the settings to try for a model on ``gpus`` devices. ``supported``: the cuts that its backend knows."""
    config, layers = model.config, model.size.layer_count
    is_trained = model.role == "trainer" and not config.frozen
    grouped = model.role != "rollout"  # processes of one device each; a replica of an engine has to be on one node

    def options(key: str, largest: int) -> list[int]:
        if key not in supported:
            return [1]
        return [2**power for power in range(20) if 2**power <= largest and gpus % 2**power == 0]

    experts = max((layer.experts for layer in model.size.layers), default=0)
    row = int(run.prompt_tokens + run.lengths.maximum)
    for tensor in options("tensor_parallel", min(cluster.gpus_per_node, gpus)):
        for pipeline in options("pipeline_parallel", min(16, layers, gpus // tensor)):
            for context in options("context_parallel", max(1, min(8, row // LONG_ROW))):
                if gpus % (tensor * pipeline * context) or (not grouped and tensor * pipeline > cluster.gpus_per_node):
                    continue
                for expert in options("expert_parallel", min(experts, gpus // pipeline)) if experts else [1]:
                    if expert > 1 and experts % expert:
                        continue
                    cut = {
                        "num_gpu": gpus,
                        "tensor_parallel": tensor,
                        "pipeline_parallel": pipeline,
                        "context_parallel": context,
                        "expert_parallel": expert,
                    }
                    cut |= _divide_layers(config, layers, pipeline)
                    if config.module == "megatron" and experts:
                        cut["megatron.expert_tensor_parallel"] = 1 if expert > 1 else tensor
                    for copies in _list_copies(config, gpus, tensor * context, expert, cluster) if is_trained else [1]:
                        yield from _vary(run, model, cut | {"dp_replicate": copies}, row, is_trained)


def _divide_layers(model: ModelConfig, layers: int, pipeline: int) -> dict[str, Any]:
    """Return Megatron's keys for layers that do not divide by the stages: the last stage, with the head, has fewer."""
    if model.module != "megatron":
        return {}
    per_stage = -(-layers // pipeline)
    last = layers - per_stage * (pipeline - 1)
    return {"megatron.first_stage_layers": None, "megatron.last_stage_layers": last if 0 < last < per_stage else None}


def _list_copies(model: ModelConfig, gpus: int, row: int, expert: int, cluster: ClusterSpec) -> list[int]:
    """Return the numbers of copies of a sharded model (HSDP): one, or one for every four or eight nodes."""
    if model.module != "fsdp" or gpus <= 8 * cluster.gpus_per_node:
        return [1]
    sizes = (gpus // (nodes * cluster.gpus_per_node) for nodes in (4, 8))
    return [1, *(copies for copies in sizes if copies > 1 and gpus % (copies * row * expert) == 0)]


def _vary(
    run: PlannedRun, model: RunModel, cut: dict[str, Any], row: int, is_trained: bool
) -> Iterator[dict[str, Any]]:
    """Yield a cut with the recomputation, the token limits and the ZeRO stages that go with it, fastest first."""
    config = model.config
    if model.role == "rollout":
        shares: Sequence[Any] = ENGINE_SHARES if config.module == "vllm" else (None,)
        yield from ({**cut, "vllm.gpu_memory_utilization": share} if share else cut for share in shares)
        return
    least = -(-row // STEPS_OF_TOKENS) * STEPS_OF_TOKENS
    limits = [limit for limit in (2 * least, least) if limit <= max(LARGEST_MICRO_BATCH, least)]
    stages = (1, 2, 3) if config.module == "deepspeed" else (None,)
    for stage in stages:
        zero = {} if stage is None else {"deepspeed.stage": stage}
        for recomputation in (None, "selective", "full") if is_trained else (None,):
            for limit in limits:
                more = {"activation_checkpointing": recomputation} if is_trained else {}
                yield {**cut, **zero, **more, "max_tokens_per_micro": limit}


def find_layouts(
    run: PlannedRun,
    model: RunModel,
    gpus: int,
    cluster: ClusterSpec,
    constants: Constants,
    budget: float,
    supported: Sequence[str],
    refuse: Refusal,
    rejected: RejectedLayouts,
    best: int,
) -> list[ModelLayout]:
    """Return the ``best`` fastest layouts of a model on ``gpus`` devices that fit into ``budget`` bytes of each."""
    fitting: list[ModelLayout] = []
    done: set[tuple[Any, ...]] = set()  # cuts of which a variant with less recomputation fits
    for settings in list_settings(run, model, gpus, cluster, supported):
        config = apply_settings(model.config, settings)
        cut = tuple(value for key, value in settings.items() if key not in (*VARIED, *ZERO))
        variant = (cut, settings.get("max_tokens_per_micro"))
        if variant in done:
            continue
        estimates = estimate_memory(config, model.role, run.config, model.size, None, cluster.memory_bytes)
        needed = max(estimate.total for estimate in estimates)
        has_cache = model.role != "rollout" or min(estimate.cache for estimate in estimates) > 0
        if needed > budget or not has_cache:
            rejected.add_too_large(model.name, needed, budget, settings)
            continue
        done.add(variant)
        try:
            seconds = predict_alone(run, replace(model, config=config), cluster, constants)
        except ValueError:
            rejected.add_too_large(model.name, needed, budget, settings)
            continue
        fitting.append(ModelLayout(settings, config, estimates, seconds))
    fitting.sort(key=lambda layout: layout.seconds)
    kept: list[ModelLayout] = []
    for layout in fitting:
        if len(kept) == best:
            break
        if reason := refuse(model.name, layout.config):
            rejected.add(model.name, reason)
        else:
            kept.append(layout)
    return kept


def predict_alone(run: PlannedRun, model: RunModel, cluster: ClusterSpec, constants: Constants) -> float:
    """Return the seconds of a step of the run in which this model alone computes."""
    work = build_work(run, model, "alone", is_moved=False, cluster=cluster)
    runtime = run.config.runtime
    job = JobShape(
        models=(work,),
        prompts=runtime.prompts_per_step,
        samples=runtime.samples_per_prompt if run.generates else 1,
        prompt_tokens=run.prompt_tokens,
        responses=run.lengths,
        mini_batches=model.config.updates_per_batch if model.role == "trainer" else 1,
    )
    return predict_step(job, cluster, constants).seconds


def find_nearest(
    run: PlannedRun, model: RunModel, cluster: ClusterSpec, budget: float, supported: Sequence[str], refuse: Refusal
) -> Settings | None:
    """Return the fewest settings to change so that a model fits into ``budget`` bytes of each of its devices."""
    config = model.config

    def list_changes(settings: Settings) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if read_setting(config, key) != value}

    fitting: list[tuple[int, float, dict[str, Any]]] = []
    for settings in list_settings(run, model, config.devices, cluster, supported):
        for kept in (
            (*VARIED, *ZERO),
            (*VARIED[1:], *ZERO),
            (),
        ):  # first with as much as possible of what is configured
            changes = {key: value for key, value in list_changes(settings).items() if key not in kept}
            estimates = estimate_memory(
                apply_settings(config, changes), model.role, run.config, model.size, None, cluster.memory_bytes
            )
            has_cache = model.role != "rollout" or min(estimate.cache for estimate in estimates) > 0
            if has_cache and (needed := max(estimate.total for estimate in estimates)) <= budget:
                fitting.append((len(changes), -needed, changes))
                break
    for _, _, changes in sorted(fitting, key=lambda candidate: candidate[:2]):
        if refuse(model.name, apply_settings(config, changes)) is None:
            return changes
    return None


def read_setting(section: Section, key: str) -> Any:
    """Return the value of a dotted key of a section; None for a missing one of a mapping."""
    value: Any = section
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value
