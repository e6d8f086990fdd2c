"""GRPO with vLLM as the roll-out engine, a trainer on two ranks and a reference, on Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.engines import SMALL, VLLM, model_dir
from tests.runs import metrics, run

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"
STEPS = 4


def grpo(directory: Path, engine: str) -> list[dict]:
    """The metrics of a run on GSM8K's prompts; dense reward, tiny model."""
    config = {
        "algorithm": "grpo",
        "seed": 1,
        "output": str(directory / engine),
        "runtime": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4, "threads": 1, "cluster": "ray"}
        | {"tensorboard": False, "plots": False},
        "data": {"train": str(DATA), "prompt_key": "question", "chat_template": "none", "max_prompt_tokens": 400},
        "reward": {"fn": "tests.runs:digits"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.01},
        "models": {
            "policy": {"module": engine, "load": str(directory / "model"), "sampling": {"max_new_tokens": 16}}
            | {"vllm": SMALL if engine == "vllm" else {}},
            "trainer": {"module": "fsdp", "num_process": 2, "optimizer": {"lr": 3e-3}, "max_tokens_per_micro": 2048},
        },
    }
    assert run(config) == 0
    return metrics(config)


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not DATA.exists(), reason="GSM8K is not there")
def test_the_curve_is_the_native_engines(tmp_path):
    model_dir(tmp_path / "model")
    native, vllm = grpo(tmp_path, "native"), grpo(tmp_path, "vllm")
    assert len(vllm) == len(native) == STEPS
    for ours, theirs in zip(native, vllm, strict=True):
        assert theirs["loss/mismatch"] < 1e-4
        for name in ("reward/mean", "loss/value", "loss/kl_ref", "tokens/response"):
            # The engines draw the same tokens, unless a rounding decides one: then noise of a few samples remains.
            assert theirs[name] == pytest.approx(ours[name], rel=0.1, abs=0.02), (name, ours["step"])
