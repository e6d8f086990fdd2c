"""Memory that models share on one card: what leaves comes back, and nobody computes with what has not arrived."""

import threading
from contextlib import contextmanager

import pytest
import torch

from coalign import memory
from coalign.devices import use_device
from coalign.memory import Arena
from tests.backends.test_moving import (  # noqa: F401
    test_a_policy_that_adopted_the_weights_stores_nothing_and_follows_them,
    test_training_with_moves_in_between_is_training,
)
from tests.standin import device as simulated
from tests.standin.device import counting
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.device
quick, races = pytest.mark.quick, pytest.mark.races
CARD = "standin:1"
MIB = 2**20


@pytest.fixture
def device():
    """The card of a worker's model, which is the current one."""
    with use_device(CARD):
        yield CARD


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("memory") / "model"))


@quick
def test_the_card_gets_its_memory_back_and_the_bits_return():
    arena = Arena(CARD)
    tensors = [torch.randn(MIB // 4, device=CARD) for _ in range(8)]
    copies = [tensor.cpu() for tensor in tensors]
    arena.settle("model", "weights", tensors)
    allocated = torch.accelerator.memory_allocated(1)
    for _ in range(2):
        assert arena.offload("model", ["weights"]) == 8 * MIB
        assert torch.accelerator.memory_allocated(1) == allocated - 8 * MIB
        arena.reload("model", ["weights"])
        assert torch.accelerator.memory_allocated(1) == allocated
        assert all(torch.equal(tensor.cpu(), copy) for tensor, copy in zip(tensors, copies, strict=True))


@quick
def test_what_leaves_is_what_was_computed_last():
    arena = Arena(CARD)
    x = torch.zeros(1000, device=CARD)
    arena.settle("model", "weights", [x])
    for value in range(1, 4):
        x.fill_(value)  # nobody waits for it before it leaves
        arena.offload("model", ["weights"])
        arena.reload("model", ["weights"])
        assert x.tolist() == [value] * 1000


@quick
def test_moving_waits_once_for_all_copies():
    arena = Arena(CARD)
    arena.settle("model", "weights", [torch.zeros(1000, device=CARD) for _ in range(20)])
    for move in (arena.offload, arena.reload):
        with counting() as counts:
            move("model", ["weights"])
        assert counts.waits == 1
        assert counts.device_to_host + counts.host_to_device == 20


@quick
@races
def test_copies_that_nobody_waits_for_would_be_found(monkeypatch):
    @contextmanager
    def hasty_stream(device, *, after_compute):
        with torch.Stream(device):
            yield

    monkeypatch.setattr(memory, "_copy_stream", hasty_stream)
    arena = Arena(CARD)
    x = torch.ones(1000, device=CARD)
    arena.settle("model", "weights", [x])
    arena.offload("model", ["weights"])
    assert arena._storages[x.untyped_storage()._cdata].host.view(torch.float32).isnan().all()
    assert "copy to the host reads" in simulated.read_races()[0]
    arena.reload("model", ["weights"])
    assert x.cpu().isnan().all()


@quick
def test_coming_back_does_not_wait_for_what_another_thread_computes():
    arena = Arena(CARD)
    weight = torch.randn(MIB, device=CARD)
    arena.settle("next", "weights", [weight])
    arena.offload("next", ["weights"])
    (torch.ones(64, 64, device=CARD) @ torch.ones(64, 64, device=CARD)).relu_()
    done = torch.Event(device=CARD)
    torch.accelerator.current_stream(1).record_event(done)
    thread = threading.Thread(target=arena.reload, args=("next", ["weights"]))
    thread.start()
    thread.join()
    assert not done.query()
    assert bool(weight.isfinite().all())
