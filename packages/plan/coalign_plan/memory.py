"""Estimates the bytes that each device of a run holds, from config.json files and settings; loads no weights.

`coalign check`, `coalign plan` and its search all ask here. Weights, gradients and optimizer states are exact for one
process with known tensor shapes, and for others up to norms and biases, about a thousandth of a model. Activations
follow Korthikanti et al. (2205.05198) for attention that does not store its scores.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from coalign.config.schema import LoraConfig, ModelConfig, RunConfig, VisionConfig, matches_layer
from coalign.hub import find_directory
from coalign.weights.model_files import read_stored
from coalign_plan.layouts.partition import (
    ModelPartition,
    ModelRole,
    StageSize,
    count_local,
    divide_model,
    find_partition,
)
from coalign_plan.model_size import LayerSize, ModelSize, TowerSize

BYTES = {"float32": 4, "bfloat16": 2}
AVERAGE = 4  # bytes a number of a moving average (ema)
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: 4 bits, an 8-bit scale per 64, a 32-bit one per 256 scales
LOGITS, CPU_LOGITS = 2**26, 2**22  # held at once (coalign/algorithms/logprobs.py)
HOST_PROCESS_BYTES = 768 * 2**20  # host memory of a process beside tensors: Python, torch, transformers
PROCESS_BYTES = 2**30  # device memory of a process beside tensors: CUDA's context, NCCL's buffers, kernels
ENGINE_BYTES = 2 * 2**30  # vLLM beside weights and cache: captured graphs, activations of a prefill
VLLM_SHARE = 0.92  # gpu_memory_utilization of vLLM, where the configuration does not say
NARROW_WEIGHTS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors")  # vLLM's quantisations of a byte a weight
LARGE_DEVICE = 70 * 2**30  # vLLM generates 1024 sequences at once on larger ones, 256 on others (its EngineArgs)
BUCKET = 5e8  # numbers in DeepSpeed's buffers for gathering and for reducing
USABLE = 0.95  # share of a device's memory: allocators lose some to fragments
LAYER = re.compile(r"\.\d+\.")  # in the names of the tensors of a numbered layer
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one model on one of its devices. An average of the weights counts as part of the optimizer.

    ``parameters`` are those of the whole model. ``buffers``: gathered layers, logits and communication, while it
    computes. ``host``: bytes of host memory beside the device's.
    """

    parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0
    buffers: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache + self.buffers

    def resident(self, moved: Collection[str]) -> int:
        """Return the bytes that stay on the device between two calls if the components ``moved`` go to the host."""
        return (0 if "weights" in moved else self.weights) + (0 if "optimizer" in moved else self.optimizer)


def estimate_largest_phase(models: Mapping[str, MemoryEstimate], moved: Mapping[str, Collection[str]]) -> int:
    """Return the peak bytes of a device that several models use one after the other.

    The active model is complete; an idle one keeps only the components that are not ``moved`` to the host.
    """
    return max(measure_turn(name, models, moved) for name in models)


def measure_turn(name: str, models: Mapping[str, MemoryEstimate], moved: Mapping[str, Collection[str]]) -> int:
    """Return the bytes on a device while one of its models computes."""
    idle = (estimate.resident(moved.get(idle_name, ())) for idle_name, estimate in models.items() if idle_name != name)
    return models[name].total + sum(idle)


def estimate_memory(
    model: ModelConfig,
    role: ModelRole,
    config: RunConfig,
    size: ModelSize,
    shapes: Shapes | None = None,
    device_bytes: float | None = None,
) -> list[MemoryEstimate]:
    """Estimate the memory of a model on a device of each of its pipeline stages.

    ``shapes`` of its tensors, if they are known; otherwise ``size`` counts. ``device_bytes``: the memory of a device,
    from which vLLM takes its share; None: its cache is what the longest samples need.
    """
    partition = find_partition(model, role)
    is_scalar = model.head != "lm"
    stages = divide_model(size, partition, scalar_head=is_scalar)
    parameters = _size(shapes) if shapes else _count_parameters(size, is_scalar)
    total = sum(stage.dense + stage.experts for stage in stages) or 1
    state = _describe_state(model, role, size, shapes, parameters)
    estimates = []
    for index, stage in enumerate(stages):
        weights, gradients, optimizer = (
            round(number * (count_local(stage, partition, component) / total))
            for component, number in zip(("weights", "gradients", "optimizer"), state, strict=True)
        )
        estimate = MemoryEstimate(parameters, weights, gradients, optimizer)
        if role == "rollout":
            cache, buffers = _estimate_engine(model, config, size, stage, partition, weights, device_bytes)
            estimates.append(replace(estimate, cache=cache, buffers=buffers))
            continue
        activations = _estimate_activations(model, role, size, stage, partition, partition.pipeline - index)
        buffers = _estimate_buffers(model, role, size, stage, partition)
        estimates.append(replace(estimate, activations=activations, buffers=buffers))
    if config.data.images is not None and size.towers:
        estimates[0] = _add_towers(estimates[0], model, role, size, partition)
    return [_leave_device(model, estimate) for estimate in estimates]


def _describe_state(
    model: ModelConfig, role: ModelRole, size: ModelSize, shapes: Shapes | None, parameters: int
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer of the whole model, before it is divided."""
    stored, computed = BYTES[model.dtype], BYTES[model.compute_dtype or model.dtype]
    if role == "rollout":
        return parameters * find_engine_width(model), 0, 0
    if role != "trainer" or model.frozen:
        width = computed if model.module in ("megatron", "deepspeed") else stored
        return parameters * width, 0, 0
    if model.module in ("megatron", "deepspeed"):  # float32 copies in the optimizer, gradients summed in float32
        trained = parameters
        weights: float = parameters * computed
        if model.lora:
            trained = _count_adapters(model, size, shapes)
            weights += trained * computed
        copies = 3 if computed == 2 or model.module == "deepspeed" else 2
        return weights, 4 * trained, 4 * copies * trained
    weights, width, trained_shapes = parameters * stored, stored, shapes
    trained = parameters
    if model.lora:  # float32 adapters beside the weights
        width, trained = 4, _count_adapters(model, size, shapes)
        trained_shapes = _derive_trained_shapes(model, size, shapes) if shapes else None
        quantised = _size(_matrices_of_layers(shapes)) if shapes else parameters - size.embedding - size.head
        weights += (int(quantised * (NF4 - stored)) if model.lora.base_bits else 0) + trained * width
    optimizer = (
        count_optimizer_bytes(trained_shapes, model.optimizer.name, width)
        if trained_shapes
        else _approximate_optimizer_bytes(trained, size, model.optimizer.name, width)
    )
    return weights, trained * width, optimizer + bool(model.ema) * AVERAGE * trained


def find_engine_width(model: ModelConfig) -> float:
    """Return the bytes of a weight in an engine."""
    if model.vllm.get("quantization") in NARROW_WEIGHTS:
        return 1
    return BYTES[model.compute_dtype or model.dtype]


def find_cache_width(model: ModelConfig) -> float:
    """Return the bytes of a number in an engine's KV cache."""
    if str(model.vllm.get("kv_cache_dtype", "")).startswith("fp8"):
        return 1
    return BYTES[model.compute_dtype or model.dtype]


def count_engine_sequences(model: ModelConfig, device_bytes: float | None = None) -> int:
    """Return the sequences that one replica of an engine generates at once."""
    if model.module == "vllm":
        return int(model.vllm.get("max_num_seqs", 1024 if (device_bytes or 0) >= LARGE_DEVICE else 256))
    return model.transformers.max_sequences if model.module == "transformers" else model.native.max_sequences


def _count_parameters(size: ModelSize, is_scalar: bool) -> int:
    towers = sum(tower.parameters for tower in size.towers)
    head = 0 if size.is_tied else size.head
    return size.parameters - towers - (head - size.hidden if is_scalar else 0)


def _add_towers(
    estimate: MemoryEstimate, model: ModelConfig, role: ModelRole, size: ModelSize, partition: ModelPartition
) -> MemoryEstimate:
    """Add the towers of a vision-language model, which no tensor rank divides, and pixels."""
    vision = model.vision or VisionConfig()
    learns = role == "trainer" and not model.frozen and model.lora is None and vision.tower == "train"
    count = sum(tower.parameters for tower in size.towers)
    shapes = {f"towers.{i}.weight": (t.hidden, t.parameters // t.hidden) for i, t in enumerate(size.towers)}
    frozen = model.model_copy(update={"frozen": True, "lora": None})
    state = _describe_state(model if learns else frozen, role, size, shapes, count)
    components = zip(("weights", "gradients", "optimizer"), state, strict=True)
    weights, gradients, optimizer = (round(number / partition.shards(component)) for component, number in components)
    return replace(
        estimate,
        parameters=estimate.parameters + count,
        weights=estimate.weights + weights,
        gradients=estimate.gradients + gradients,
        optimizer=estimate.optimizer + optimizer,
        activations=estimate.activations + sum(_estimate_tower(model, tower, learns) for tower in size.towers),
        host=estimate.host + vision.cache_mib * 2**20,
    )


def _estimate_tower(model: ModelConfig, tower: TowerSize, learns: bool) -> int:
    """Return the bytes of activations and pixels of a micro-batch that is as large as its limits allow."""
    computed = BYTES[model.compute_dtype or model.dtype]
    tokens = model.max_tokens_per_micro if tower.merged > 1 else None  # else a token may stand for many patches
    limits = (model.max_patches_per_micro, tokens and tokens * tower.merged)
    patches = min((limit for limit in limits if limit is not None), default=0)
    kept = tower.count_kept(None)  # one layer at a time
    if learns:
        recomputation = model.activation_checkpointing
        kept = tower.layers * tower.count_kept(recomputation) + (kept if recomputation else 0)
    return int(patches * (kept + tower.patch) * computed)


# ---- activations, buffers and caches ---------------------------------------------------------------------------------


def _estimate_activations(
    model: ModelConfig, role: ModelRole, size: ModelSize, stage: StageSize, partition: ModelPartition, in_flight: int
) -> int:
    """Return the bytes that one device keeps. ``in_flight``: micro-batches of a 1F1B pipeline at this stage."""
    computed = BYTES[model.compute_dtype or model.dtype]
    tokens = (model.max_tokens_per_micro or 0) / (partition.context * partition.tensor)
    working = max((layer.count_kept(size.hidden, None) for layer in stage.layers), default=0)
    if role != "trainer" or model.frozen:
        return int(tokens * working * computed)  # one layer at a time
    recomputation = model.activation_checkpointing
    kept = sum(layer.count_kept(size.hidden, recomputation) for layer in stage.layers)
    if model.module == "megatron" and recomputation == "full":
        kept /= model.megatron.recompute_num_layers
    elif model.module == "megatron" and recomputation == "selective":  # attention alone, as flash attention does
        kept = sum(layer.count_kept(size.hidden, None) for layer in stage.layers)
    if partition.pipeline > 1:
        kept *= (
            in_flight * (1 + (partition.pipeline - 1) / (partition.pipeline * partition.virtual))
            if (partition.virtual > 1)
            else in_flight
        )
    if recomputation is not None:
        kept += working  # the layer that is computed again
    if model.module == "megatron" and not model.megatron.sequence_parallel:
        tokens *= partition.tensor**0.5  # norms and residuals are whole, products are divided
    return int(tokens * kept * computed)


def _estimate_buffers(
    model: ModelConfig, role: ModelRole, size: ModelSize, stage: StageSize, partition: ModelPartition
) -> int:
    """Return the bytes of layers that are gathered to compute, and of the head's logits."""
    computed, trains = BYTES[model.compute_dtype or model.dtype], role == "trainer" and not model.frozen
    logits = 0.0
    if stage.has_head and model.head == "lm":
        limit = LOGITS if model.devices else CPU_LOGITS
        held = min(limit, (model.max_tokens_per_micro or limit) * size.vocabulary)
        logits = held * 4 * (3 if trains else 1)  # their softmax and gradient
    gathered = 0.0
    if partition.gathers:
        largest = max((_gather(layer, partition) for layer in stage.layers), default=0.0)
        outer = stage.outer  # embedding and head, which stay gathered until the step ends
        gathered = (2 * largest + outer) * computed  # the next layer is fetched ahead
        if trains and not model.lora:
            gathered += (largest + outer) * (computed + 4)  # gradients, and their copy that is summed in float32
    elif model.module == "deepspeed" and partition.ranks > 1 and trains:
        gathered = BUCKET * (computed + 4)
    elif model.module not in ("megatron", "deepspeed") and computed < BYTES[model.dtype] and trains:
        gathered = (stage.dense + stage.experts) * computed  # autocast keeps copies of trained weights
    return int(logits + gathered)


def _gather(layer: LayerSize, partition: ModelPartition) -> float:
    experts = layer.experts * layer.expert
    return (layer.parameters - experts) / partition.tensor + experts / partition.expert


def _estimate_engine(
    model: ModelConfig,
    config: RunConfig,
    size: ModelSize,
    stage: StageSize,
    partition: ModelPartition,
    weights: int,
    device_bytes: float | None,
) -> tuple[int, int]:
    """Return the bytes of an engine's KV cache and of its buffers on one device."""
    longest = config.data.max_prompt_tokens + model.sampling.max_new_tokens
    wanted = config.runtime.prompts_per_step * config.runtime.samples_per_prompt
    sequence = count_cache_bytes(model, size, stage, partition, longest)
    if model.module != "vllm":
        sequences = min(count_engine_sequences(model), wanted)
        if model.native.kv_tokens:
            return int(sequence * model.native.kv_tokens / longest), 0
        return int(sequence * sequences), 0
    if fixed := model.vllm.get("kv_cache_memory_bytes"):
        return int(fixed), ENGINE_BYTES
    if device_bytes is None:
        return int(sequence * min(count_engine_sequences(model), wanted)), ENGINE_BYTES
    share = model.vllm.get("gpu_memory_utilization", VLLM_SHARE) * device_bytes
    return max(0, int(share - weights - ENGINE_BYTES)), ENGINE_BYTES


def count_cache_bytes(
    model: ModelConfig, size: ModelSize, stage: StageSize, partition: ModelPartition, tokens: float
) -> float:
    """Return the bytes that a sequence of ``tokens`` takes in the KV cache of one device."""
    total = 0.0
    for layer in stage.layers:  # heads that tensor parallelism cannot divide are on every device
        shards = min(partition.tensor, max(layer.cache_heads, 1))
        total += (layer.cache * layer.attended(tokens) + layer.state) / shards
    return total * find_cache_width(model)


def _leave_device(model: ModelConfig, estimate: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate of a model whose state the host keeps, as its settings say."""
    remaining, zero = estimate, model.deepspeed
    if model.cpu_offload and model.module == "fsdp":
        host = remaining.weights + remaining.gradients + remaining.optimizer
        return replace(remaining, weights=0, gradients=0, optimizer=0, host=host)
    if model.module == "deepspeed" and zero.offload_optimizer:
        remaining = replace(remaining, optimizer=0, host=remaining.optimizer)
    if model.module == "deepspeed" and zero.offload_parameters:
        remaining = replace(remaining, weights=0, host=remaining.host + remaining.weights)
    return remaining


# ---- tensors by name -------------------------------------------------------------------------------------------------


def read_shapes(directory: Path) -> Shapes:
    """Read tensor shapes from the headers of a directory's safetensors files; none if it has no such files."""
    return {name: tensor.shape for name, tensor in (read_stored(directory) or {}).items()}


def read_shapes_of(model: ModelConfig, size: ModelSize) -> Shapes | None:
    """Read the tensor shapes of a model whose weights are on this machine; None for others.

    The files of a vision-language checkpoint say too much: only its language model is loaded.
    """
    if model.load is None or model.init != "load" or size.towers:
        return None
    directory = find_directory(model.load)
    return read_shapes(directory) or None


def count_optimizer_bytes(shapes: Shapes, name: str, width: int) -> int:
    """Return the bytes of an optimizer's state for tensors of these shapes with ``width`` bytes a number."""
    if name == "adamw_8bit":  # small tensors in 32 bits; each moment of the others has a scale per block of 256
        sizes = [prod(shape) for shape in shapes.values()]
        return sum(2 * (size + 4 * -(-size // 256)) if size >= 4096 else 8 * size for size in sizes)
    if name == "adafactor":
        return width * sum(_count_factors(shape) for shape in shapes.values())
    moments = 2 * _size(shapes) - (_size(_matrices_of_layers(shapes)) if name == "muon" else 0)
    return width * moments


def _approximate_optimizer_bytes(trained: float, size: ModelSize, name: str, width: int) -> float:
    """Return the bytes of an optimizer's state for ``trained`` numbers in matrices of unknown shapes."""
    outer = min(size.embedding + (0 if size.is_tied else size.head), trained)
    match name:
        case "adamw_8bit":
            return 2 * trained * (1 + 4 / 256)
        case "adafactor":
            return width * 2 * trained / size.hidden
        case "muon":
            return width * (trained + outer)
    return width * 2 * trained


def derive_adapter_shapes(shapes: Shapes, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A [rank, in] and B [out, rank] of each linear layer; with DoRA its magnitude [out]."""
    adapters: dict[str, tuple[int, ...]] = {}
    for name, (out, inputs) in _matrices_of_layers(shapes).items():
        layer = name.removesuffix(".weight")
        if any(pattern == "all-linear" or matches_layer(layer, pattern) for pattern in lora.target):
            adapters |= {f"{layer}.lora_A": (lora.rank, inputs), f"{layer}.lora_B": (out, lora.rank)}
            adapters |= {f"{layer}.magnitude": (out,)} if lora.dora else {}
    return adapters


def _derive_trained_shapes(model: ModelConfig, size: ModelSize, shapes: Shapes) -> Shapes:
    assert model.lora is not None
    head = {} if model.head == "lm" else {"score.weight": (1, size.hidden)}
    return derive_adapter_shapes(shapes, model.lora) | head


def _count_adapters(model: ModelConfig, size: ModelSize, shapes: Shapes | None) -> int:
    """Return the numbers that adapters train; without shapes, as if on every matrix of the layers."""
    assert model.lora is not None
    if shapes:
        return _size(_derive_trained_shapes(model, size, shapes))
    return size.lora_parameters(model.lora.rank) + (size.hidden if model.head != "lm" else 0)


def _matrices_of_layers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and LAYER.search(name)}


def _count_factors(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) > 1 else prod(shape)


def _size(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
