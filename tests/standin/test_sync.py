"""Weights on their way between models on cards: bit for bit, within one process and between processes."""

from contextlib import ExitStack

import pytest
import torch

from coalign.cluster.choice import start_cluster
from coalign.cluster.placement import nodes
from coalign.cluster.placement.nodes import _Accelerator
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig, SyncConfig
from coalign.roles import Context
from coalign.weights.sync.sync import WeightSync
from coalign.weights.sync.transport import LiveTensorTransport, TensorCopyTransport
from tests.standin import modules
from tests.weights.processes import Processes
from tests.weights.test_transports import expected, same

pytestmark = pytest.mark.device
quick = pytest.mark.quick


@pytest.fixture
def cluster(monkeypatch):
    """Two models on two cards of this process, or in turns on one."""
    monkeypatch.setitem(nodes.ACCELERATORS, "GPU", _Accelerator("standin", "STANDIN_VISIBLE_DEVICES"))
    with ExitStack() as running:

        def start(**runtime):
            given = {"trainer": "Sender", "policy": "Reader"}
            configs = {
                name: ModelConfig(module=f"tests.standin.modules:{module}", num_gpu=1) for name, module in given.items()
            }
            settings = RuntimeConfig(cluster="local", threads=1, call_timeout=60.0, **runtime)
            config = RunConfig(algorithm="none", models=configs, runtime=settings)
            cluster = running.enter_context(start_cluster(config))
            for name, config in configs.items():
                cluster.spawn(name, config, Context(model=name, threads=1))
            return cluster.models["trainer"], cluster.models["policy"]

        yield start


def test_models_of_one_process_have_cards_of_their_own(cluster):
    trainer, policy = cluster()
    places = [model.run(lambda module, store: module.context.device).result() for model in (trainer, policy)]
    assert places == [["standin:0"], ["standin:1"]]
    current = [
        model.run(lambda module, store: torch.accelerator.current_device_index()).result()
        for model in (trainer, policy)
    ]
    assert current == [[0], [1]]


@quick
@pytest.mark.parametrize("runtime", [{}, {"colocation": [["trainer", "policy"]]}], ids=["two cards", "in turns"])
@pytest.mark.parametrize("overlap", [False, True])
def test_within_one_process(cluster, runtime, overlap):
    trainer, policy = cluster(**runtime)
    sync = WeightSync(trainer, policy, overlap=overlap)
    for version in range(3):
        sync(version)
        assert type(sync.transport) is (TensorCopyTransport if overlap else LiveTensorTransport)
        found, weights = policy.serving().result()
        assert found == version and same(weights, expected(1, version))
        trainer.learn().result()
        if overlap or not runtime:
            assert same(policy.serving().result()[1], expected(1, version))


@pytest.mark.parametrize("transport", ["shared_memory", "object_store", "disk", "broadcast"])
def test_between_processes(tmp_path, transport):
    trainer = Processes("trainer", modules.Sender, device="standin:0")
    policy = Processes("policy", modules.Reader, 2, device="standin:1")
    try:
        config = SyncConfig(transport=transport, timeout=60.0, bucket_mib=1, directory=str(tmp_path / "sync"))
        sync = WeightSync(trainer, policy, config)
        for version in range(3):
            sync(version)
            for found, weights in policy.call("serving"):
                assert found == version and same(weights, expected(1, version))
            trainer.call("learn")
    finally:
        trainer.close()
        policy.close()
