"""Models that leave the device between any two calls compute what they would have computed anyway. Two of these tests
also run on the simulated device (tests/standin) and on CUDA (tests/gpu)."""

import gc

import pytest
import torch

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.scorers.cached import CachedModule
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.memory import PARTS, Arena, OutOfDeviceMemory
from coalign.roles import Context
from tests.backends.batches import prompts, rollout
from tests.backends.test_fsdp import same, weights

BATCHES = [rollout((5, 9), 2, seed=seed) for seed in range(3)]
PROMPTS = prompts(3, 5)


@pytest.fixture
def device() -> str:
    return "cpu"


def build(cls, path, name="trainer", *, device="cpu", **config):
    context = Context(model=name, device=device, loss=Objective(PolicyGradient()), samples_per_prompt=2)
    module = cls(ModelConfig(load=path, **config), context)
    module.setup()
    module.measure_memory()
    return module


@pytest.mark.parametrize(
    "config",
    [
        {"ema": {"decay": 0.9}},
        {"lora": {"rank": 2}},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"optimizer": {"name": "muon", "lr": 1e-2}})),
        {"optimizer": {"name": "adafactor", "lr": 1e-2}, "activation_checkpointing": "full", "dtype": "bfloat16"},
    ],
    ids=lambda config: next(iter(config), "adamw"),
)
def test_training_with_moves_in_between_is_training(path, tmp_path, device, config):
    config = {"optimizer": {"lr": 1e-2}, "device": device} | config
    stays, moves = build(FSDPModule, path, **config), build(FSDPModule, path, **config)
    for batch in BATCHES:
        moves.move("host", PARTS)
        assert moves.measure_memory() == {} and moves.arena.used == 0
        moves.move("device", PARTS)
        assert moves.train_step(batch) == stays.train_step(batch)
        moves.measure_memory()
    moves.move("host", ["optimizer"])
    assert torch.equal(*(m.forward_step(BATCHES[0])["ref_logprobs"] for m in (stays, moves)))
    assert same(weights(stays), weights(moves))
    moves.move("device", ["optimizer"])
    moves.save(tmp_path / "state")
    fresh = build(FSDPModule, path, **config)
    fresh.move("host", PARTS)
    fresh.move("device", PARTS)
    fresh.load(tmp_path / "state")
    assert fresh.train_step(BATCHES[0]) == stays.train_step(BATCHES[0]) and same(weights(fresh), weights(stays))


def test_each_part_has_the_bytes_it_should(path):
    trainer = build(FSDPModule, path, ema={"decay": 0.9})
    size = 4 * sum(p.numel() for p in trainer.model.parameters())
    steps = 4 * len(list(trainer.model.parameters()))  # AdamW counts the steps of each parameter
    assert trainer.measure_memory() == {"weights": size, "optimizer": 3 * size + steps}
    trainer.arena.begin()
    trainer.train_step(BATCHES[0])
    assert trainer.arena.peak == 5 * size + steps  # with the gradients
    assert trainer.measure_memory() == {"weights": size, "optimizer": 3 * size + steps}
    assert build(FSDPModule, path, "reference", frozen=True).measure_memory() == {"weights": size}


def test_a_gradient_without_room_is_refused_before_it_is_computed(path):
    trainer = build(FSDPModule, path)
    before = weights(trainer)
    trainer.arena.limit = trainer.arena.used + 1000
    with pytest.raises(OutOfDeviceMemory, match="for the gradients of 'trainer'"):
        trainer.train_step(BATCHES[0])
    assert same(before, weights(trainer))


def test_a_policy_that_adopted_the_weights_stores_nothing_and_follows_them(path, device):
    arena = Arena(device)
    trainer = build(FSDPModule, path, device=device, optimizer={"lr": 1e-2})
    policy = build(NativeModule, path, "policy", device=device)
    trainer.arena = policy.arena = arena
    trainer.measure_memory()
    alone = arena.used
    policy.load_weights(trainer.export_weights(), version=0, adopt=True)
    assert policy.measure_memory() == {"weights": 0} and arena.used == alone
    trainer.move("host", PARTS)
    sampled = policy.generate(PROMPTS, max_new_tokens=4)  # the weights are still there: the policy has them
    assert trainer.measure_memory() == {} and policy.measure_memory() == {"weights": arena.used}
    policy.move("host", PARTS)
    assert arena.used == 0
    trainer.move("device", PARTS)
    assert arena.used == alone
    policy.move("device", ["weights"])
    again = policy.generate(PROMPTS, max_new_tokens=4)
    assert torch.equal(sampled["tokens"], again["tokens"])
    assert torch.equal(sampled["rollout_logprobs"], again["rollout_logprobs"])
    trainer.train_step(BATCHES[0])
    assert not torch.equal(policy.generate(PROMPTS, max_new_tokens=4)["rollout_logprobs"], again["rollout_logprobs"])


def test_a_policy_with_weights_of_its_own_comes_back(path):
    policy = build(NativeModule, path, "policy", sampling=SamplingConfig(max_new_tokens=4))
    first = policy.generate(PROMPTS)
    size = policy.measure_memory()["weights"]
    policy.move("host", PARTS)
    assert policy.measure_memory() == {} and policy.arena.list_offloaded("policy") == {"weights": size}
    policy.move("device", PARTS)
    assert torch.equal(policy.generate(PROMPTS)["rollout_logprobs"], first["rollout_logprobs"])


def test_memory_of_weights_that_were_replaced_is_given_back(path):
    policy = build(NativeModule, path, "policy")
    source = build(FSDPModule, path)
    policy.load_weights(weights(source).items(), version=0)
    size = policy.measure_memory()["weights"]
    policy.load_weights(weights(source).items(), version=1, adopt=True)
    gc.collect()
    assert policy.measure_memory()["weights"] == size == policy.arena.used


def test_the_cache_is_counted_while_it_is_there(path):
    policy = build(NativeModule, path, "policy")
    policy.generate(PROMPTS, max_new_tokens=4)
    size = policy.measure_memory()["weights"]
    policy.arena.begin()
    policy.generate(PROMPTS, max_new_tokens=4)
    # 8 slots of 16 tokens (4 of 9 are asked for); 2 layers of keys and values, 2 heads of 8 numbers
    cache = 8 * 16 * (2 * 2 * 2 * 8 * 4)
    assert policy.arena.peak == size + cache and policy.measure_memory() == {"weights": size}
    policy.arena.limit = size + cache - 1
    with pytest.raises(OutOfDeviceMemory, match="for the kv of 'policy'"):
        policy.generate(PROMPTS, max_new_tokens=4)
    policy.arena.limit = size + cache
    assert len(policy.generate(PROMPTS, max_new_tokens=4)) == 4 and policy.measure_memory() == {"weights": size}


def test_models_that_stand_before_others_move_with_them(path, tmp_path):
    batch = BATCHES[0]
    cached = build(CachedModule, path, "reference", frozen=True, cache=str(tmp_path / "cache"))
    assert cached.measure_memory() == {}
    first = cached.forward_step(batch)["ref_logprobs"]
    size = cached.measure_memory()["weights"]
    cached.move("host", PARTS)
    assert cached.measure_memory() == {} and cached.arena.used == 0
    cached.move("device", PARTS)
    assert torch.equal(cached.scorer.forward_step(batch)["ref_logprobs"], first) and cached.measure_memory() == {
        "weights": size
    }
    cached.unload()
    assert cached.measure_memory() == {} and cached.arena.used == 0
