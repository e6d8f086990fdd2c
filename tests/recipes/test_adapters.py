"""The reference of a run of adapters is what they lie on; tests/engine/test_adapters.py has whole runs of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_offline import configuration
from tests.runs import metrics, run, run_to_end, settings, weights_hash


def adapted(directory: Path, algorithm: str):
    make = settings if algorithm in ("grpo", "ppo") else configuration
    config = make(directory, algorithm, steps=2)
    config["models"]["trainer"]["lora"] = {"rank": 4, "alpha": 8.0, "target": ["*.q_proj", "*.down_proj"]}
    if algorithm == "grpo":
        config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
    return config


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ("dpo", "kto", "grpo", "ppo"))
def test_the_base_is_the_reference(tmp_path, algorithm):
    shared = adapted(tmp_path, algorithm)
    assert not any(name.startswith("time/reference") for name in run_to_end(shared)[-1])
    apart = shared | {"output": str(tmp_path / "apart")}
    run(apart, f"models.reference.cache={tmp_path / 'cache'}")  # a model of its own
    assert any(name.startswith("time/reference") for name in metrics(apart)[-1])
    assert weights_hash(shared, 2) == weights_hash(apart, 2)
