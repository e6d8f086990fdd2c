"""How much memory each model of a run will take, from its files' headers and its settings; loads no weights.

Weights, gradients and optimizer are exact for dense models. Activations follow the count of Korthikanti et al.
(2205.05198) for attention that does not store its scores: 17 numbers of the hidden size and 2 of the intermediate size
per token and layer are kept for the backward pass, or one of the hidden size with gradient checkpointing. An
estimate, to see what fits before it is tried.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from coalign.config.schema import ModelConfig, RunConfig
from coalign.types import Rollout, Trainable

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Estimate:
    """Bytes of one model over all of its processes."""

    parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


def parameter_count(directory: Path) -> int:
    """Parameters in the safetensors files of a directory, from their headers. OSError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no *.safetensors files")
    total = 0
    for file in files:
        with open(file, "rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def estimate(model: ModelConfig, role: type, config: RunConfig) -> Estimate:
    """The memory of one model in the role it plays."""
    directory = Path(model.load)
    shape = json.loads((directory / "config.json").read_text())
    shape = shape.get("text_config", shape)
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    parameters = parameter_count(directory) if model.init == "load" else _count_from(shape)
    stored, computed = BYTES[model.dtype], BYTES[model.compute_dtype or model.dtype]
    if role is Rollout:
        heads = shape.get("num_key_value_heads", shape["num_attention_heads"])
        head_size = shape.get("head_dim") or hidden // shape["num_attention_heads"]
        longest = config.data.max_prompt_tokens + model.sampling.max_new_tokens
        wanted = config.runtime.prompts_per_step * config.runtime.samples_per_prompt
        tokens = model.native.kv_tokens or min(model.native.max_sequences, wanted) * longest
        return Estimate(parameters, parameters * computed, cache=2 * tokens * layers * heads * head_size * computed)
    tokens = model.max_tokens_per_micro or 0
    if role is not Trainable or model.frozen:
        return Estimate(parameters, parameters * stored, activations=4 * tokens * hidden * computed)
    intermediate = shape.get("intermediate_size", 4 * hidden)
    kept = hidden if model.gradient_checkpointing else 17 * hidden + 2 * intermediate
    return Estimate(
        parameters,
        parameters * stored,
        gradients=parameters * stored,
        optimizer=2 * parameters * stored,
        activations=tokens * layers * kept * computed,
    )


def _count_from(shape: Mapping[str, int]) -> int:
    """Parameters of a dense gated decoder, from its configuration."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_size = shape.get("head_dim") or hidden // heads
    attention = hidden * head_size * (2 * heads + 2 * shape.get("num_key_value_heads", heads))
    mlp = 3 * hidden * shape.get("intermediate_size", 4 * hidden)
    embeddings = shape["vocab_size"] * hidden * (1 if shape.get("tie_word_embeddings", True) else 2)
    return shape["num_hidden_layers"] * (attention + mlp + 2 * hidden) + embeddings + hidden
