"""Memory that models share on one card: what leaves comes back, and nobody computes with what has not arrived."""

import threading
from contextlib import contextmanager

import pytest
import torch

from coalign import memory
from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.memory import PARTS, Arena
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.standin import device
from tests.standin.device import counting
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.device
quick, races = pytest.mark.quick, pytest.mark.races
CARD = "standin:1"
MIB = 2**20
PROMPTS = Batch(torch.tensor([3, 5])).with_(
    tokens=torch.arange(8, dtype=torch.int32), group=torch.arange(2), rows=[{}, {}]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("memory") / "model"))


def build(cls, path, name="trainer", **config):
    context = Context(model=name, device=CARD, loss=Objective(PolicyGradient()), samples_per_prompt=2)
    module = cls(ModelConfig(load=path, **config), context)
    module.setup()
    module.measure_memory()
    return module


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
    assert "copy to the host reads" in device.read_races()[0]
    arena.reload("model", ["weights"])
    assert x.cpu().isnan().all()


@pytest.mark.parametrize("config", [{}, {"ema": {"decay": 0.9}}, {"lora": {"rank": 2}}], ids=["plain", "ema", "lora"])
def test_training_with_moves_in_between_is_training(path, config):
    stays, moves = (build(FSDPModule, path, optimizer={"lr": 1e-2}, **config) for _ in range(2))
    for seed in range(3):
        moves.move("host", PARTS)
        assert moves.arena.used == 0
        moves.move("device", PARTS)
        assert moves.train_step(rollout(seed=seed)) == stays.train_step(rollout(seed=seed))
        moves.measure_memory()
    pairs = zip(stays.export_weights(), moves.export_weights(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_a_policy_that_adopted_the_weights_sleeps_and_wakes(path):
    trainer, policy = build(FSDPModule, path, optimizer={"lr": 1e-2}), build(NativeModule, path, "policy")
    trainer.arena = policy.arena = Arena(CARD)
    trainer.measure_memory()
    policy.load_weights(trainer.export_weights(), version=0, adopt=True)
    assert policy.measure_memory() == {"weights": 0}
    first = policy.generate(PROMPTS, max_new_tokens=4)
    trainer.move("host", PARTS)
    assert torch.equal(policy.generate(PROMPTS, max_new_tokens=4)["tokens"], first["tokens"])
    policy.move("host", PARTS)
    assert trainer.arena.used == 0
    trainer.move("device", PARTS)
    policy.move("device", PARTS)
    again = policy.generate(PROMPTS, max_new_tokens=4)
    assert torch.equal(first["tokens"], again["tokens"])
    assert torch.equal(first["rollout_logprobs"], again["rollout_logprobs"])


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
