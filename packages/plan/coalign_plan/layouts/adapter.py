"""Turns the configuration of a run, with the layout that it asks for, into the job whose step is predicted.

Nothing of a backend is imported: a prediction takes as long as importing torch. What the footprint of a model is
follows from its module's name here; a test compares it with the modules' own word (Module.one_group).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coalign.cluster.placement.slots import Footprint, Slot, list_movable_parts, pack_slots
from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import ModelConfig, RunConfig
from coalign.hub import find_directory
from coalign_plan.gpus import ClusterSpec
from coalign_plan.hf_config import read_directory
from coalign_plan.job import JobShape, LengthDistribution, ModelWork, Parallelism, Recompute, Sharding
from coalign_plan.layouts.devices import DeviceLoad, list_device_loads
from coalign_plan.layouts.partition import TRAINERS, ModelPartition, ModelRole, find_partition, is_cut
from coalign_plan.memory import (
    VLLM_SHARE,
    MemoryEstimate,
    count_engine_sequences,
    estimate_memory,
    find_cache_width,
    find_engine_width,
    read_shapes_of,
)
from coalign_plan.model_size import ModelSize

PROMPT_SHARE, RESPONSE_SHARE = 0.5, 0.3  # mean length over the limit, where nobody gives lengths
PAIRED = ("preferences",)  # types of rows that are two sequences
UNKNOWN_LENGTH = 2048  # tokens of a row of data whose limit nobody set


@dataclass(frozen=True)
class RunModel:
    """One model of a run that takes devices or shares those of ``base_of``, whose weights it computes with."""

    name: str
    role: ModelRole
    config: ModelConfig
    size: ModelSize
    base_of: str | None = None


@dataclass(frozen=True)
class PlannedRun:
    """What the planner knows of a run: its settings, its models that have weights, and how long its samples are.

    ``row_type``: the type of its rows (coalign.data.kinds). ``assumes``: what was assumed because nobody said it.
    """

    config: RunConfig
    models: Mapping[str, RunModel]
    row_type: str
    lengths: LengthDistribution
    prompt_tokens: float
    assumes: tuple[str, ...] = ()

    @property
    def started(self) -> dict[str, ModelConfig]:
        """The settings of the models that have processes of their own."""
        return {name: model.config for name, model in self.models.items() if model.base_of is None}

    @property
    def generates(self) -> bool:
        return any(model.role == "rollout" for model in self.models.values())

    def with_config(self, config: RunConfig) -> PlannedRun:
        """Return the run with other settings of the same models."""
        models = {}
        for name, model in self.models.items():
            frozen = {"frozen": True} if model.role == "scorer" else {}
            models[name] = replace(model, config=config.models[name].model_copy(update=frozen))
        return PlannedRun(config, models, self.row_type, self.lengths, self.prompt_tokens, self.assumes)


def read_run(
    config: RunConfig,
    roles: Mapping[str, ModelRole],
    row_type: str,
    bases: Mapping[str, str],
    lengths: LengthDistribution | None = None,
) -> PlannedRun:
    """Describe a run for the planner. ``roles`` of its models; ``bases``: models that share the weights of another.

    ConfigError for a model whose config.json does not say how large it is.
    """
    models = {}
    for name, role in roles.items():
        model = config.models.get(name)
        if model is None or model.load is None:
            continue
        try:
            size = read_directory(find_directory(model.load))
        except (OSError, ValueError) as problem:
            message = f"{model.load}: {problem}; the planner needs the config.json of every model"
            raise ConfigError([ConfigProblem(("models", name, "load"), message)]) from problem
        models[name] = RunModel(
            name, role, model.model_copy(update={"frozen": role == "scorer" or model.frozen}), size, bases.get(name)
        )
    assumes = []
    if row_type == "prompts":
        limit = max((m.config.sampling.max_new_tokens for m in models.values() if m.role == "rollout"), default=1)
        prompt = PROMPT_SHARE * config.data.max_prompt_tokens
        assumes.append(f"prompts of {prompt:,.0f} tokens (half of data.max_prompt_tokens)")
        if lengths is None:
            lengths = LengthDistribution(max(1.0, RESPONSE_SHARE * limit), float(limit))
            assumes.append(
                f"responses of {lengths.mean:,.0f} tokens on average ({RESPONSE_SHARE:.0%} of max_new_tokens)"
            )
    else:
        prompt = 0.0
        if lengths is None:
            limit = config.data.max_tokens or UNKNOWN_LENGTH
            lengths = LengthDistribution(max(1.0, PROMPT_SHARE * limit), float(limit))
            assumes.append(f"rows of {lengths.mean:,.0f} tokens on average, {limit:,} at most")
    return PlannedRun(config, models, row_type, lengths, prompt, tuple(assumes))


def is_one_group(model: ModelConfig, role: ModelRole) -> bool:
    """Whether the processes of a model form one group of ranks; otherwise they are replicas."""
    module = model.module.lower()
    if module not in TRAINERS:
        return role == "trainer"
    if module == "deepspeed":
        return not model.frozen or model.deepspeed.stage == 3
    return not model.frozen or is_cut(model)


def pack_models(run: PlannedRun) -> dict[str, Slot]:
    """Return the slot of each model that is started. ConfigError for numbers that do not divide."""
    footprints = {
        name: Footprint.of(name, model, is_one_group(model, run.models[name].role))
        for name, model in run.started.items()
    }
    return pack_slots(footprints, run.config.runtime.colocation)


def estimate_run(run: PlannedRun, cluster: ClusterSpec | None) -> dict[str, list[MemoryEstimate]]:
    """Estimate the memory of each started model on a device of each of its pipeline stages."""
    estimates = {}
    for name in run.started:
        model = run.models[name]
        memory = cluster.memory_bytes if cluster and model.config.devices else None
        shapes = read_shapes_of(model.config, model.size)
        estimates[name] = estimate_memory(model.config, model.role, run.config, model.size, shapes, memory)
    return estimates


def list_run_loads(run: PlannedRun, slots: Mapping[str, Slot], cluster: ClusterSpec) -> list[DeviceLoad]:
    """List the different devices of a run on a cluster, fullest first."""
    unique = list({id(slot): slot for slot in slots.values()}.values())
    return list_device_loads(unique, run.started, estimate_run(run, cluster))


def build_job(
    run: PlannedRun, slots: Mapping[str, Slot], cluster: ClusterSpec, staleness: int | None = None
) -> JobShape:
    """Build the job of one step. ``staleness``: in place of `runtime.max_staleness`."""
    runtime, rollout = run.config.runtime, run.config.rollout
    staleness = runtime.max_staleness if staleness is None else staleness
    works = []
    for model in run.models.values():
        slot = slots[model.base_of or model.name]
        base = run.models[model.base_of or model.name].config
        shared = len(slot.positions) > 1 and model.base_of is None and runtime.device_memory is None
        movable = list_movable_parts(base, slot.footprints[model.base_of or model.name].devices, shared)
        group = slot.name if slot.devices else "CPU"  # where all models compute in turn
        work = build_work(run, model, group, is_moved=shared and "weights" in movable, cluster=cluster)
        works.append(work)
        works += _list_passes_before(run, model, work, staleness)
    trainer = next((model.config for model in run.models.values() if model.role == "trainer"), None)
    rows, samples = runtime.prompts_per_step, runtime.samples_per_prompt if run.generates else 1
    samples = 2 if run.row_type in PAIRED else samples
    if runtime.tokens_per_step:
        rows = max(1, round(runtime.tokens_per_step / (run.lengths.mean + run.prompt_tokens) / samples))
    return JobShape(
        models=tuple(works),
        prompts=rows,
        samples=samples,
        prompt_tokens=run.prompt_tokens,
        responses=run.lengths,
        max_staleness=staleness if run.generates else 0,
        partial_rollout=staleness > 0 or rollout.round_tokens is not None,
        oversample=rollout.oversample,
        mini_batches=trainer.updates_per_batch if trainer else 1,
        shares_prompts=bool(trainer and trainer.share_prefix and samples > 1),
        sync_every=run.config.sync.every,
    )


def build_work(run: PlannedRun, model: RunModel, group: str, *, is_moved: bool, cluster: ClusterSpec) -> ModelWork:
    """Describe what one model does in a step, on the devices of ``group``. ``is_moved``: it leaves them after."""
    config, base = model.config, run.models[model.base_of].config if model.base_of else model.config
    partition = find_partition(base, "trainer" if model.base_of else model.role)
    narrow = config.fp8 or "fp8" in str(config.vllm.get("quantization", ""))
    computed = config.compute_dtype or config.dtype
    tokens = config.max_tokens_per_micro or int(run.lengths.maximum + run.prompt_tokens)
    recompute: Recompute = config.activation_checkpointing or "none"
    return ModelWork(
        name=model.name,
        role=model.role,
        size=model.size,
        layout=find_parallelism(partition),
        group=group,
        precision="fp8" if narrow else "bf16" if computed == "bfloat16" else "fp32",
        weight_bytes=find_engine_width(config) if model.role == "rollout" else (2.0 if computed == "bfloat16" else 4.0),
        kv_bytes=find_cache_width(config),
        micro_batch_tokens=max(1, tokens // partition.context),
        recompute=recompute,
        offload_optimizer=config.cpu_offload or (config.module == "deepspeed" and config.deepspeed.offload_optimizer),
        offload_weights=config.cpu_offload or (config.module == "deepspeed" and config.deepspeed.offload_parameters),
        lora_rank=config.lora.rank if config.lora and model.role == "trainer" else None,
        is_moved=is_moved,
        is_eager=model.role == "rollout" and config.devices > 0 and is_eager_engine(config),
        max_sequences=count_engine_sequences(config, cluster.memory_bytes),
        memory_share=config.vllm.get("gpu_memory_utilization", VLLM_SHARE),
        passes=config.epochs_per_batch if model.role == "trainer" else 1,
        head_outputs=None if config.head == "lm" else 1,
        recomputes_head=model.role == "trainer" and config.head == "lm",  # blocks of logits (algorithms/logprobs.py)
    )


def is_eager_engine(model: ModelConfig) -> bool:
    """Whether the host launches each kernel of a decode step: in all engines but vLLM with captured graphs."""
    return model.module != "vllm" or bool(model.vllm.get("enforce_eager"))


def find_parallelism(partition: ModelPartition) -> Parallelism:
    """Return a partition in the terms of the prediction."""
    sharding: Sharding = "none"
    for component in ("optimizer", "gradients", "weights"):
        if component in partition.stores:
            sharding = component
    data = partition.data
    return Parallelism(
        tensor=partition.tensor,
        pipeline=partition.pipeline,
        context=partition.context,
        expert=partition.expert,
        data=data,
        virtual_pipeline=partition.virtual,
        sharding=sharding,
        shard_group=max(1, data * partition.context // partition.replicas) if partition.replicas > 1 else None,
    )


def _list_passes_before(run: PlannedRun, model: RunModel, work: ModelWork, staleness: int) -> list[ModelWork]:
    """Return the forward passes that a trainer makes before it trains: values, and old log-probs."""
    if model.role != "trainer" or not run.generates:
        return []
    config = model.config
    if config.head == "value":
        name = f"{model.name}, values"
    elif config.head == "lm" and (staleness or config.updates_per_batch * config.epochs_per_batch > 1):
        name = f"{model.name}, old log-probs"
    else:
        return []
    return [replace(work, name=name, role="scorer", is_moved=False, passes=1)]
