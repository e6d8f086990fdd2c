"""On Ray: a trainer of two FSDP ranks and two replicas, by each transport, in turn."""

from __future__ import annotations

import pytest
import torch

from coalign.cluster.choice import start_cluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig, SyncConfig
from coalign.roles import Context
from coalign.weights.sync.sync import WeightSync
from tests.cluster.conftest import ray_here  # noqa: F401
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
TRANSPORTS = ["auto", "broadcast", "object_store", "disk"]


@pytest.fixture(scope="module")
def models(ray_here, tmp_path_factory):  # noqa: F811
    path = str(tiny_model_dir(tmp_path_factory.mktemp("model") / "model"))
    configs = {
        "trainer": ModelConfig(load=path, num_process=2),
        "policy": ModelConfig(module="native", load=path, num_process=2),
    }
    with start_cluster(
        RunConfig(algorithm="none", models=configs, runtime=RuntimeConfig(cluster="ray", threads=1))
    ) as cluster:
        for name, config in configs.items():
            cluster.spawn(name, config, Context(model=name, threads=1))
        yield cluster.models["trainer"], cluster.models["policy"]


@torch.no_grad()
def shift(module, store, amount):
    """Change every parameter of this rank."""
    for parameter in module.model.parameters():
        parameter += amount


def exported(module, store):
    return {name: tensor.clone() for name, tensor in module.export_weights()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_replicas_serve_what_two_ranks_train(models, tmp_path, transport):
    trainer, policy = models
    sync = WeightSync(trainer, policy, SyncConfig(transport=transport, directory=str(tmp_path), timeout=60.0))
    for version in range(3):
        trainer.run(shift, 0.01).result()
        stats = sync(version)
        shares = trainer.run(exported).result()
        wanted = shares[0] | shares[1]
        assert all(shares) and len(wanted) == sum(map(len, shares))
        assert stats["sync/bytes"].value == sum(tensor.nbytes for tensor in wanted.values())
        for found in policy.run(exported).result():
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    if transport == "auto":
        assert type(sync.transport).__name__ == "SharedMemoryTransport"
