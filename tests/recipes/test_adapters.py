"""Adapters in every recipe: only they learn, the reference is what they lie on, a stopped run goes on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.recipes.test_offline import RECIPES, configuration
from tests.runs import metrics, run, run_in_two_parts, settings, weights_hash

LORA = {"rank": 4, "alpha": 8.0, "target": ["*.q_proj", "*.down_proj"]}
ONLINE = ("grpo", "ppo")


def adapted(directory: Path, algorithm: str, **runtime):
    make = settings if algorithm in ONLINE else configuration
    config = make(directory, algorithm, **{"steps": 4, "save_every": 2} | runtime)
    config["models"]["trainer"]["lora"] = LORA
    if algorithm == "grpo":
        config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
    return config


@pytest.mark.slow  # of SFT and PPO tests/engine/test_adapters.py sees it in `make test`
@pytest.mark.parametrize("algorithm", (*RECIPES, *ONLINE))
def test_only_the_adapted_layers_move_and_a_stopped_run_resumes(tmp_path, algorithm):
    whole = adapted(tmp_path, algorithm)
    run(whole)
    cut = run_in_two_parts(whole)
    assert weights_hash(cut, 4) == weights_hash(whole, 4)

    saved = Path(whole["output"]) / "checkpoints" / "step_4"
    before, after = (load_file(d / "model.safetensors") for d in (tmp_path / "model", saved / "hf"))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved and all(name.split(".")[-2] in ("q_proj", "down_proj") for name in moved)
    assert {name.split(".")[-2] for name in load_file(saved / "adapter" / "adapter_model.safetensors")} <= {
        "lora_A",
        "lora_B",
        "score",
    }


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ("dpo", "kto", "grpo", "ppo"))
def test_the_base_is_the_reference(tmp_path, algorithm):
    shared = adapted(tmp_path, algorithm, steps=2)
    run(shared)
    assert not any(name.startswith("time/reference") for name in metrics(shared)[-1])
    apart = adapted(tmp_path, algorithm, steps=2) | {"output": str(tmp_path / "apart")}
    run(apart, f"models.reference.cache={tmp_path / 'cache'}")  # a model of its own
    assert any(name.startswith("time/reference") for name in metrics(apart)[-1])
    assert weights_hash(shared, 2) == weights_hash(apart, 2)
