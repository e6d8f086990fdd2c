"""Estimates the memory of each model of a run from its files' headers and its settings; loads no weights.

Weights, gradients and optimizer states are exact for dense models. Activations follow Korthikanti et al. (2205.05198)
for attention that does not store its scores: 17 numbers of the hidden size and 2 of the intermediate size per token and
layer are kept for the backward pass, or one of the hidden size with gradient checkpointing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from coalign.config.schema import LoraConfig, ModelConfig, RunConfig
from coalign.hub import find_directory
from coalign.roles import Rollout, Trainable

BYTES = {"float32": 4, "bfloat16": 2}
AVERAGE = 4  # bytes a number of a moving average (ema)
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: 4 bits, an 8-bit scale per 64, a 32-bit one per 256 scales
LAYER = re.compile(r"\.\d+\.")  # in the names of the tensors of a numbered layer
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one model over all of its processes. An average of the weights counts as part of the optimizer."""

    parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache

    def resident(self, moved: Collection[str]) -> int:
        """Return the bytes that stay on the device between two calls if the parts ``moved`` go to the host."""
        return (0 if "weights" in moved else self.weights) + (0 if "optimizer" in moved else self.optimizer)


def estimate_largest_phase(models: Mapping[str, MemoryEstimate], moved: Mapping[str, Collection[str]]) -> int:
    """Return the peak bytes of a device whose models take turns.

    In its turn a model has all that it needs; of the others stays what is not ``moved`` to the host.
    """
    resident = {name: estimate.resident(moved.get(name, ())) for name, estimate in models.items()}
    return max(models[name].total + sum(resident.values()) - resident[name] for name in models)


def read_shapes(directory: Path) -> Shapes:
    """Read tensor shapes from the headers of a directory's safetensors files. Raises OSError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no *.safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with open(file, "rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def estimate_memory(model: ModelConfig, role: type, config: RunConfig) -> MemoryEstimate:
    """Estimate the memory of one model, which must name a directory, in its role."""
    from coalign.backends.pretrained import read_config  # imports transformers

    assert model.load is not None
    directory = find_directory(model.load)
    whole = read_config(model)
    shape = whole.get_text_config()
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    # Of a vision-language checkpoint only the language model is loaded.
    is_there = model.init == "load" and whole is shape and any(directory.glob("*.safetensors"))
    shapes = read_shapes(directory) if is_there else _build_shapes(model)
    parameters = _size(shapes)
    stored, computed = BYTES[model.dtype], BYTES[model.compute_dtype or model.dtype]
    if role is Rollout:
        all_heads = getattr(shape, "num_attention_heads", 0)  # none: states, whose size does not grow with tokens
        heads = getattr(shape, "num_key_value_heads", None) or all_heads
        head_size = getattr(shape, "head_dim", None) or (hidden // all_heads if all_heads else 0)
        longest = config.data.max_prompt_tokens + model.sampling.max_new_tokens
        wanted = config.runtime.prompts_per_step * config.runtime.samples_per_prompt
        tokens = model.native.kv_tokens or min(model.native.max_sequences, wanted) * longest
        return MemoryEstimate(
            parameters, parameters * computed, cache=2 * tokens * layers * heads * head_size * computed
        )
    tokens = model.max_tokens_per_micro or 0
    if role is not Trainable or model.frozen:
        return MemoryEstimate(parameters, parameters * stored, activations=4 * tokens * hidden * computed)
    intermediate = getattr(shape, "intermediate_size", None) or getattr(shape, "n_inner", None) or 4 * hidden
    # Numbers kept per token and layer: the layer's input, the matrix products' results, or everything.
    match model.activation_checkpointing:
        case "full":
            kept = hidden
        case "selective":
            kept = 6 * hidden + 2 * intermediate
        case None:
            kept = 17 * hidden + 2 * intermediate
    weights, trained, width = parameters * stored, shapes, stored
    if model.lora:  # float32 adapters beside the weights
        trained, width = derive_adapter_shapes(shapes, model.lora), 4
        if model.head != "lm":
            trained["score.weight"] = (1, hidden)
        quantised = _size(_matrices_of_layers(shapes)) if model.lora.base_bits else 0
        weights += int(quantised * (NF4 - stored)) + _size(trained) * width
    return MemoryEstimate(
        parameters,
        weights,
        gradients=_size(trained) * width,
        optimizer=count_optimizer_bytes(trained, model.optimizer.name, width)
        + bool(model.ema) * AVERAGE * _size(trained),
        activations=tokens * layers * kept * computed,
    )


def count_optimizer_bytes(shapes: Shapes, name: str, width: int) -> int:
    """Return the bytes of an optimizer's state for tensors of these shapes with ``width`` bytes a number."""
    if name == "adamw_8bit":  # small tensors in 32 bits; each moment of the others has a scale per block of 256
        sizes = [prod(shape) for shape in shapes.values()]
        return sum(2 * (size + 4 * -(-size // 256)) if size >= 4096 else 8 * size for size in sizes)
    if name == "adafactor":
        return width * sum(_count_factors(shape) for shape in shapes.values())
    moments = 2 * _size(shapes) - (_size(_matrices_of_layers(shapes)) if name == "muon" else 0)
    return width * moments


def derive_adapter_shapes(shapes: Shapes, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A [rank, in] and B [out, rank] of each linear layer; with DoRA its magnitude [out]."""
    adapters: dict[str, tuple[int, ...]] = {}
    for name, (out, inputs) in _matrices_of_layers(shapes).items():
        layer = name.removesuffix(".weight")
        if any(pattern == "all-linear" or fnmatchcase(layer, pattern) for pattern in lora.target):
            adapters |= {f"{layer}.lora_A": (lora.rank, inputs), f"{layer}.lora_B": (out, lora.rank)}
            adapters |= {f"{layer}.magnitude": (out,)} if lora.dora else {}
    return adapters


def _matrices_of_layers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and LAYER.search(name)}


def _count_factors(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1] if len(shape) > 1 else prod(shape)


def _size(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _build_shapes(model: ModelConfig) -> Shapes:
    """Return the shapes of a model without weights on this machine, from its architecture."""
    from coalign.backends.pretrained import build_skeleton  # imports transformers

    skeleton = build_skeleton(model.model_copy(update={"lora": None}), packed=False)
    return {name: tuple(weight.shape) for name, weight in skeleton.named_parameters()}
