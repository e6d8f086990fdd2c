"""Whole runs that train adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import runs

LORA = {"rank": 4, "target": ["*.q_proj", "*.mlp.*"]}


def adapted(directory: Path, algorithm: str, **runtime):
    config = runs.settings(directory, algorithm, **runtime)
    config["models"]["trainer"] |= {"lora": LORA, "optimizer": {"lr": 3e-2}}
    return config


def merged(config, step: int, hf: str = "hf") -> dict[str, torch.Tensor]:
    return load_file(Path(config["output"]) / "checkpoints" / f"step_{step}" / hf / "model.safetensors")


@pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_policy_samples_from_the_merged_weights(tmp_path, cluster):
    config = adapted(tmp_path, "grpo", cluster=cluster)
    steps = [m for m in runs.run_to_end(config) if "loss/mismatch_max" in m]
    assert len(steps) == 4
    # The trainer's own log-probs of what the policy sampled, after 0, 1, 2 and 3 updates.
    assert max(m["loss/mismatch_max"] for m in steps) < 1e-5
    assert all(m["loss/grad_norm"] > 0 for m in steps)
    start, end = load_file(tmp_path / "model" / "model.safetensors"), merged(config, 4)
    moved = {name for name in end if not torch.equal(start[name], end[name])}
    assert moved == {name for name in end if "q_proj.weight" in name or "mlp" in name}


@pytest.mark.slow
def test_on_ray_only_what_changes_travels_after_the_first_time(tmp_path):
    config = adapted(tmp_path, "grpo", cluster="ray")
    assert runs.run(config) == 0
    end = merged(config, 4)
    # With the queries go the other matrices of their block, since engines fuse some of them.
    changing = sum(t.nbytes for name, t in end.items() if "mlp" in name or ("self_attn" in name and t.dim() == 2))
    assert {m["sync/bytes"] for m in runs.metrics(config) if "sync/bytes" in m} == {changing}


def test_a_checkpoint_holds_the_adapter_alone_too_and_a_stopped_run_ends_with_the_same_weights_and_averages(tmp_path):
    import peft

    whole = adapted(tmp_path, "sft", save_every=2, eval_at_start=False)
    whole["models"]["trainer"] |= {"lora": LORA | {"dropout": 0.2}, "ema": {"decay": 0.5}}
    assert runs.run(whole) == 0
    directory = Path(whole["output"]) / "checkpoints" / "step_4"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload()
    for name, tensor in theirs.named_parameters():
        torch.testing.assert_close(tensor.detach(), merged(whole, 4)[name], rtol=1e-6, atol=1e-7)
    assert "adapter/adapter_model.safetensors" in (directory / "manifest.json").read_text()
    resumed = runs.run_in_two_parts(whole)
    assert runs.weights_hash(resumed, 4) == runs.weights_hash(whole, 4) != runs.weights_hash(whole, 2)
    averages = merged(resumed, 4, "hf_ema"), merged(whole, 4, "hf_ema")
    assert all(torch.equal(averages[0][name], tensor) for name, tensor in averages[1].items())


def test_ppo_with_adapters_on_both_models(tmp_path):
    config = adapted(tmp_path, "ppo", steps=2)
    config["models"]["value"] = {"lora": LORA, "optimizer": {"lr": 3e-2}}
    steps = [m for m in runs.run_to_end(config) if "loss/mismatch_max" in m]
    assert max(m["loss/mismatch_max"] for m in steps) < 1e-5
    assert all(m["value/loss/grad_norm"] > 0 for m in steps)
    checkpoint = Path(config["output"]) / "checkpoints" / "step_2"
    keys = load_file(checkpoint / "adapter_value" / "adapter_model.safetensors").keys()
    assert "base_model.model.score.weight" in keys
