"""Which way weights take within one process, and what the target computes with afterwards."""

from __future__ import annotations

import pytest
import torch

from coalign.cluster.start import start
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.types import Context, Total
from coalign.weights.in_process import Adopt, Copy
from coalign.weights.sync import WeightSync
from tests.weights.test_transports import EMBED, LAYER


@pytest.fixture
def models():
    given = {"trainer": "Sender", "policy": "Adopter"}
    configs = {name: ModelConfig(module=f"tests.weights.modules:{module}") for name, module in given.items()}
    runtime = RuntimeConfig(cluster="local", threads=1, call_timeout=60.0)
    with start(RunConfig(algorithm="none", models=configs, runtime=runtime)) as cluster:
        for name, config in configs.items():
            cluster.spawn(name, config, Context(model=name, threads=1))
        yield cluster.models["trainer"], cluster.models["policy"]


def test_in_one_process_the_live_tensors_are_adopted(models):
    trainer, policy = models
    sync = WeightSync(trainer, policy)
    assert sync(0)["sync/bytes"] == Total(0)
    assert isinstance(sync.transport, Adopt)
    trainer.learn().result()
    version, weights = policy.serving().result()
    assert version == 0 and torch.equal(weights["layers.0.weight"], torch.ones(3, 5))


def test_in_one_process_a_target_that_computes_meanwhile_gets_a_copy(models):
    trainer, policy = models
    sync = WeightSync(trainer, policy, overlap=True)
    assert sync(0)["sync/bytes"] == Total(EMBED + LAYER)
    assert isinstance(sync.transport, Copy)
    trainer.learn().result()
    version, weights = policy.serving().result()
    assert version == 0 and torch.equal(weights["layers.0.weight"], torch.zeros(3, 5))
    sync(1)
    version, weights = policy.serving().result()
    assert version == 1 and torch.equal(weights["layers.0.weight"], torch.ones(3, 5))
