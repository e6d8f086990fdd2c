"""A rollout backend and a trainer must mean the same by a log-prob, before and after the weights have moved."""

import pytest
import torch

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.conformance.engines import prompts
from tests.tiny import tiny_model_dir

SAMPLING = {"temperature": 0.8, "max_new_tokens": 12}


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
@pytest.mark.parametrize("adopt", [True, False])
def test_sampled_logprobs_are_the_trainers(tmp_path, device, family, adopt):
    path = str(tiny_model_dir(tmp_path, family=family))
    config = {"load": path, "sampling": SAMPLING, "optimizer": {"lr": 1e-2}}
    trainer = FSDPModule(ModelConfig(**config), Context(device=device, loss=Objective(PolicyGradient())))
    policy = NativeModule(ModelConfig(module="native", **config), Context(device=device, samples_per_prompt=4))
    trainer.setup()
    policy.setup()
    for version in range(3):
        if version == 0 or not adopt:  # adopted weights follow the trainer by themselves
            policy.load_weights(trainer.export_weights(), version=version, adopt=adopt)
        batch = policy.generate(prompts(3))
        mask = batch["loss_mask"]
        own = trainer.forward_step(batch)["ref_logprobs"]
        torch.testing.assert_close(batch["rollout_logprobs"][mask], own[mask], rtol=1e-4, atol=2e-5)
        stats = trainer.train_step(batch.with_(advantages=torch.ones(batch.tokens_total), old_logprobs=own))
        assert stats["loss/ratio"].value == pytest.approx(1.0, abs=1e-4)
    policy.close()
    trainer.close()
