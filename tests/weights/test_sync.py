"""Which way weights take within one process, and what the target computes with afterwards."""

from __future__ import annotations

import pytest
import torch

from coalign.cluster.choice import start_cluster
from coalign.cluster.future import WorkerError
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.roles import Context
from coalign.types import Total
from coalign.weights.sync.sync import WeightSync
from coalign.weights.sync.transport import LiveTensorTransport, TensorCopyTransport
from tests.weights.test_transports import EMBED, LAYER

IN_TURNS = [["trainer", "policy"]]


@pytest.fixture
def models(request):
    given = {"trainer": "Sender", "policy": "Adopter"}
    configs = {name: ModelConfig(module=f"tests.weights.modules:{module}") for name, module in given.items()}
    runtime = RuntimeConfig(cluster="local", threads=1, call_timeout=60.0, colocation=getattr(request, "param", []))
    with start_cluster(RunConfig(algorithm="none", models=configs, runtime=runtime)) as cluster:
        for name, config in configs.items():
            cluster.spawn(name, config, Context(model=name, threads=1))
        yield cluster.models["trainer"], cluster.models["policy"]


def test_in_one_process_the_live_tensors_are_adopted(models):
    trainer, policy = models
    sync = WeightSync(trainer, policy)
    assert sync(0)["sync/bytes"] == Total(0)
    assert isinstance(sync.transport, LiveTensorTransport)
    trainer.learn().result()
    version, weights = policy.serving().result()
    assert version == 0 and torch.equal(weights["layers.0.weight"], torch.ones(3, 5))


@pytest.mark.parametrize("models", [[], IN_TURNS], indirect=True, ids=["apart", "in turns"])
def test_in_one_process_a_target_that_computes_meanwhile_gets_a_copy(models):
    trainer, policy = models
    sync = WeightSync(trainer, policy, overlap=True)
    assert sync(0)["sync/bytes"] == Total(EMBED + LAYER)
    assert isinstance(sync.transport, TensorCopyTransport)
    trainer.learn().result()
    version, weights = policy.serving().result()
    assert version == 0 and torch.equal(weights["layers.0.weight"], torch.zeros(3, 5))
    sync(1)
    version, weights = policy.serving().result()
    assert version == 1 and torch.equal(weights["layers.0.weight"], torch.ones(3, 5))


@pytest.mark.parametrize("overlap", [False, True])
def test_in_one_process_a_stream_that_breaks_off_leaves_a_replica_that_does_not_serve(models, overlap):
    trainer, policy = models
    sync = WeightSync(trainer, policy, overlap=overlap)
    sync(0)
    trainer.misbehave("break").result()
    with pytest.raises(WorkerError, match="the export broke"):
        sync(1)
    [why] = policy.run(lambda module, store: module.unfit).result()
    assert "version 1 were installed in part only" in why
    trainer.misbehave("").result()
    sync(2)
    assert policy.serving().result()[0] == 2
