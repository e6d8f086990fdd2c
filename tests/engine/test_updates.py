"""Runs with several updates a batch learn the same whatever the number of trainer processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import run, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("ray")


def weights(config, step):
    return load_file(Path(config["output"]) / "checkpoints" / f"step_{step}" / "hf" / "model.safetensors")


@pytest.mark.parametrize(("algorithm", "ranks"), [("grpo", 2), ("dpo", 3)])
def test_on_ray_the_weights_are_those_of_one_process(tmp_path, algorithm, ranks):
    """Groups and pairs; in single precision, whose order of summation differs."""
    config = settings(tmp_path, algorithm, steps=2, eval_at_start=False)
    config["data"].pop("eval")
    config["models"]["trainer"] |= {"updates_per_batch": 4, "optimizer": {"lr": 1e-3}}
    assert run(config) == 0
    several = config | {"output": str(tmp_path / "ray")}
    assert run(several, "runtime.cluster=ray", f"models.trainer.num_process={ranks}") == 0
    found = weights(several, 2)
    for name, tensor in weights(config, 2).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("algorithm", "ranks"), [("grpo", 2), ("ppo", 3), ("dpo", 3)])
def test_an_exact_reduction_gives_the_bits_of_one_process(tmp_path, algorithm, ranks):
    """Scores of the trainer, the reference and the value model are the same, too, and so is what is sampled."""
    config = settings(tmp_path, algorithm, steps=2, eval_at_start=False)
    config["data"].pop("eval")
    exact = {"reduction": "exact", "max_tokens_per_micro": 48}
    config["models"]["trainer"] |= {"updates_per_batch": 2, "optimizer": {"lr": 1e-3}, **exact}
    learners = [name for name in ("trainer", "value") if name in config["models"]]
    for name in [*learners, "reference"]:
        if name in config["models"]:
            config["models"][name] |= exact
    assert run(config) == 0
    several = config | {"output": str(tmp_path / "ray")}
    assert run(several, "runtime.cluster=ray", *(f"models.{name}.num_process={ranks}" for name in learners)) == 0
    found, expected = weights(several, 2), weights(config, 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
