"""Estimates of memory against what models of the same settings really hold."""

from pathlib import Path

import pytest
import torch

from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig, RunConfig
from coalign.launch.memory_table import find_shapes
from coalign.planner.hf_config import read_directory
from coalign.planner.memory import MemoryEstimate, estimate_largest_phase, estimate_memory
from coalign.roles import Context
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), hidden=64, family="llama", tied=False))


def estimate(model: ModelConfig, *, exact: bool = True):
    """The estimate of a trainer that has no pipeline."""
    size = read_directory(Path(model.load))
    shapes = find_shapes(model, size) if exact else None
    [found] = estimate_memory(model, "trainer", RunConfig(algorithm="sft"), size, shapes)
    return found


def both(path: str, **config):
    """(the estimate, the module)"""
    model = ModelConfig(load=path, **config)
    module = FSDPModule(model, Context())
    module.setup()
    return estimate(model), module


def held(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def state(module: FSDPModule) -> list[torch.Tensor]:
    """Without step counts and what is shared by all parameters."""
    entries = [item for own in module.optimizer.state.values() for item in own.items()]
    return [value for key, value in entries if key != "step" and not key.startswith("qmap")]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizers_state(path, name, dtype):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    expected, module = both(path, optimizer={"name": name}, dtype=dtype)
    assert expected.optimizer == held(state(module))
    assert expected.weights == expected.gradients == held(module.model.parameters())


@pytest.mark.parametrize(
    "lora", [{"rank": 3}, {"rank": 2, "target": ["*.q_proj", "model.layers.0.mlp.*"]}, {"dora": True}]
)
def test_adapters(path, lora):
    pytest.importorskip("peft")
    expected, module = both(path, lora=lora, ema={"decay": 0.9})
    trained = [p for p in module.model.parameters() if p.requires_grad]
    assert expected.gradients == held(trained)
    assert expected.weights == held(module.model.parameters())
    assert expected.optimizer == held(state(module)) + held(module.average.tensors.values())


def test_random_weights_are_counted_from_the_configuration(path):
    loaded, drawn = (estimate(ModelConfig(load=path, init=init)) for init in ("load", "random"))
    assert loaded == drawn


def test_the_largest_phase_of_models_that_take_turns():
    trainer = MemoryEstimate(1, weights=10, gradients=10, optimizer=20, activations=5)
    policy, reference = MemoryEstimate(1, weights=10, cache=30), MemoryEstimate(1, weights=10, activations=1)
    models = {"policy": policy, "trainer": trainer, "reference": reference}
    assert (
        estimate_largest_phase(models, {}) == 10 + 30 + (10 + 20) + 10
    )  # the policy's turn, beside weights and optimizer
    everything = dict.fromkeys(models, ("weights", "gradients", "optimizer", "kv"))
    assert estimate_largest_phase(models, everything) == 10 + 10 + 20 + 5
    assert estimate_largest_phase(models, everything | {"reference": ()}) == 45 + 10
    assert estimate_largest_phase(models, {"trainer": ("optimizer",)}) == max(40 + 10 + 10, 45 + 20)
