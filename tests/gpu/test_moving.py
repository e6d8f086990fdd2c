"""Leaving a CUDA device, with its own allocator as the judge: `pytest -m gpu tests/gpu`."""

import threading

import pytest
import torch

from coalign.memory import Arena
from tests.backends.test_moving import (  # noqa: F401
    test_a_policy_that_adopted_the_weights_stores_nothing_and_follows_them,
    test_training_with_moves_in_between_is_training,
)
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda:0"
MIB = 2**20


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def path(tmp_path):
    return str(tiny_model_dir(tmp_path / "model"))


def test_the_device_gets_its_memory_back_and_the_bits_return():
    arena = Arena(DEVICE)
    tensors = [torch.randn(MIB, device=DEVICE) for _ in range(8)]
    copies = [tensor.cpu() for tensor in tensors]
    arena.settle("model", "weights", tensors)
    allocated, reserved = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)
    for _ in range(2):
        assert arena.offload("model", ["weights"]) == 32 * MIB
        assert torch.cuda.memory_allocated(DEVICE) == allocated - 32 * MIB
        assert torch.cuda.memory_reserved(DEVICE) <= reserved - 32 * MIB  # other processes can have it
        arena.reload("model", ["weights"])
        assert torch.cuda.memory_allocated(DEVICE) == allocated
        assert all(torch.equal(tensor.cpu(), copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_coming_back_does_not_wait_for_what_another_thread_computes():
    arena = Arena(DEVICE)
    weight = torch.randn(64 * MIB, device=DEVICE)
    arena.settle("next", "weights", [weight])
    arena.offload("next", ["weights"])
    matrix = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(400):
        matrix = (matrix @ matrix).clamp_(-1, 1)
    end = torch.cuda.Event()
    end.record()
    thread = threading.Thread(target=arena.reload, args=("next", ["weights"]))
    thread.start()
    thread.join()
    assert not end.query()  # the products are still under way
    torch.cuda.synchronize()
    arena.offload("next", ["weights"])
    arena.reload("next", ["weights"])
    assert bool(weight.isfinite().all())
