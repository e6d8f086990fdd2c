"""Model directories that hold a config.json alone, and runs of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign_plan.job import LengthDistribution
from coalign_plan.layouts.adapter import PlannedRun, read_run

# Llama 3.1 8B
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA |= {"tie_word_embeddings": False}


def write_config(directory: Path, **changes: Any) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(directory)


def describe_grpo(load: str, **runtime: Any) -> PlannedRun:
    """A policy, its trainer and a reference on eight devices in turn."""
    policy = ModelConfig(module="vllm", load=load, compute_dtype="bfloat16", num_gpu=8)
    trainer = ModelConfig(load=load, compute_dtype="bfloat16", num_gpu=8, activation_checkpointing="full")
    reference = ModelConfig(load=load, compute_dtype="bfloat16", dtype="bfloat16", num_gpu=8, frozen=True)
    turns = [["policy", "trainer", "reference"]]
    settings = {"prompts_per_step": 64, "samples_per_prompt": 8, "colocation": turns} | runtime
    models = {"policy": policy, "trainer": trainer, "reference": reference}
    config = RunConfig(algorithm="grpo", models=models, runtime=RuntimeConfig(**settings))
    roles = {"policy": "rollout", "trainer": "trainer", "reference": "scorer"}
    return read_run(config, roles, "prompts", {}, LengthDistribution(200, 256))  # pyright: ignore[reportArgumentType]
