"""Adapters of stacked experts: what they compute, what leaves the model merged, what peft reads."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.backends import lora as adapters
from coalign.backends import pretrained
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from coalign_deepspeed.module import DeepSpeedModule
from coalign_serve.weights.adapter import merge_adapter
from tests.backends.batches import prompts, rollout
from tests.backends.test_fsdp import module
from tests.backends.test_lora import scores
from tests.backends.test_routers import paths  # noqa: F401  (a fixture)

EXPERTS = {"target": ["*.q_proj", "*.experts.*"], "rank": 2}


def trained(path: str, **config):
    trainer = module(path, lora=EXPERTS, **config)
    for seed in range(3):
        trainer.train_step(rollout(seed=seed))
    return trainer


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe"])
def test_merged_weights_compute_what_the_adapters_do(paths, family, tmp_path):  # noqa: F811
    path = paths(family)
    base = scores(module(path, frozen=True))
    trainer = trained(path)
    named = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert sum(".experts." in name for name in named) == 2 * 2 * 2  # layers, parameters, factors
    own = scores(trainer)
    assert float((own - base).abs().max()) > 1e-3
    torch.testing.assert_close(scores(trainer, base=True), base, rtol=0, atol=1e-6)
    trainer.save_hf(tmp_path / "merged")
    torch.testing.assert_close(scores(module(str(tmp_path / "merged"), frozen=True)), own, rtol=0, atol=2e-5)
    trainer.save_adapter(tmp_path / "adapter")
    again = module(path, lora=EXPERTS | {"load": str(tmp_path / "adapter")})
    torch.testing.assert_close(scores(again), own, rtol=0, atol=1e-6)
    merged = merge_adapter(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter")
    theirs = merged.state_dict()
    exported = dict(trainer.export_weights())
    assert exported.keys() <= theirs.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6)


def test_the_engine_takes_what_changes(paths):  # noqa: F811
    path = paths("qwen3_moe")
    trainer = module(path, lora=EXPERTS)
    policy = NativeModule(ModelConfig(load=path, sampling={"max_new_tokens": 6}), Context())
    policy.setup()
    policy.load_weights(trainer.export_weights(), version=0)
    for seed in range(3):
        trainer.train_step(rollout(seed=seed))
    changing = dict(trainer.export_weights(changing=True))
    assert {name.rpartition(".")[2] for name in changing} >= {"gate_up_proj", "down_proj"}
    assert len(changing) < len(dict(trainer.export_weights()))
    policy.load_weights(changing.items(), version=1)
    out = policy.generate(prompts(4), samples=2)
    own = trainer.forward_step(out, into="old_logprobs")["old_logprobs"]
    torch.testing.assert_close(own, out["rollout_logprobs"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("key", [{"dora": True}, {"dropout": 0.1}])
def test_settings_that_experts_do_not_have(paths, key):  # noqa: F811
    with pytest.raises(ValueError, match=r"models.trainer.lora.\w+ is .*: adapters of stacked experts .* have none"):
        module(paths("qwen3_moe"), lora=EXPERTS | key)


def test_backends_that_cannot_adapt_experts(paths):  # noqa: F811
    config = {"load": paths("qwen3_moe"), "lora": EXPERTS}
    for kind, settings, key in (
        (FSDPModule, {"expert_parallel": 2}, "expert_parallel is 2"),
        (DeepSpeedModule, {"deepspeed": {"stage": 3}}, r"deepspeed\.stage is 3"),
    ):
        with pytest.raises(ValueError, match=rf"models\.trainer\.{key}: adapters of stacked experts"):
            kind.check_architecture(ModelConfig(**config, **settings), "trainer")


def test_a_pattern_that_matches_nothing(paths):  # noqa: F811
    with pytest.raises(ValueError, match=r"lora.target: '\*.experts.up' matches none of the linear layers"):
        module(paths("qwen3_moe"), lora={"target": ["*.experts.up"]})
    skeleton = pretrained.build_skeleton(ModelConfig(load=paths("qwen3_moe")))
    assert len(adapters._find_target_experts(skeleton, ["*.experts.*"])) == 4
    assert not adapters._find_target_experts(skeleton, ["all-linear"])
