"""Weights between processes on one GPU. Run there with `pytest -m gpu tests/gpu`; no machine of ours has run it yet."""

import pytest
import torch

from coalign.config.schema import SyncConfig
from coalign.weights.sync.shared_memory import CudaIpcTransport
from coalign.weights.sync.sync import WeightSync
from tests.weights import modules
from tests.weights.processes import Processes
from tests.weights.test_transports import expected, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("module", [modules.Reader, modules.Adopter])
def test_handles_of_device_memory(module):
    trainer = Processes("trainer", modules.Sender, 2, device="cuda:0")
    policy = Processes("policy", module, 2, device="cuda:0")
    sync = WeightSync(trainer, policy, SyncConfig(timeout=60.0))
    for version in range(3):
        sync(version)
        trainer.call("learn")
        for found, weights in policy.call("serving"):
            assert found == version
            assert all(tensor.is_cuda for tensor in weights.values())
            assert same({name: tensor.cpu() for name, tensor in weights.items()}, expected(2, version))
    assert isinstance(sync.transport, CudaIpcTransport)
    trainer.close()
    policy.close()
