"""The engines of this process on the simulated device: the conformance suite, and the tokens of the CPU."""

import pytest
import torch

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.conformance.engines import build, model_dir, prompts
from tests.conformance.test_engines import *  # noqa: F403
from tests.conformance.test_rollout import prompts as short_prompts
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.device
CARD = "standin:0"


def on_card(**settings):
    return Context(**{"model": "policy", "device": CARD, "samples_per_prompt": 3, "seed": 5} | settings)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["native", "transformers"])
def engine(request, directory):
    module = build(request.param, directory, on_card())
    yield module
    module.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 0.0}, marks=pytest.mark.quick),
        {"temperature": 1.0, "top_k": 0},
        {"top_p": 0.9, "top_k": 20},
        {"min_p": 0.05, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "plain", "truncated", "penalised"],
)
def test_the_cpu_chooses_the_same_tokens(directory, settings):
    there, here = (build("native", directory, context).generate(prompts(), **settings) for context in (on_card(), None))
    assert torch.equal(there["tokens"], here["tokens"])
    torch.testing.assert_close(there["rollout_logprobs"], here["rollout_logprobs"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
def test_other_families_choose_the_same_tokens(tmp_path, family):
    path = tiny_model_dir(tmp_path, family=family)
    there, here = (build("native", path, context).generate(prompts()) for context in (on_card(), None))
    assert torch.equal(there["tokens"], here["tokens"])


def test_a_cache_that_is_too_small_for_all_makes_requests_wait(directory):
    few = build("native", directory, on_card(), native={"max_sequences": 2, "prefill_tokens": 32})
    assert torch.equal(few.generate(prompts())["tokens"], build("native", directory).generate(prompts())["tokens"])


@pytest.mark.parametrize("adopt", [True, False])
def test_sampled_log_probs_are_the_trainers(tmp_path, adopt):
    path = str(tiny_model_dir(tmp_path))
    config = {"load": path, "sampling": {"temperature": 0.8, "max_new_tokens": 12}, "optimizer": {"lr": 1e-2}}
    trainer = FSDPModule(ModelConfig(**config), on_card(loss=Objective(PolicyGradient())))
    trainer.setup()
    policy = build("native", tmp_path, on_card(), **config)
    for version in range(3):
        if version == 0 or not adopt:
            policy.load_weights(trainer.export_weights(), version=version, adopt=adopt)
        batch = policy.generate(short_prompts())
        mask = batch["loss_mask"]
        own = trainer.forward_step(batch)["ref_logprobs"]
        torch.testing.assert_close(batch["rollout_logprobs"][mask], own[mask], rtol=1e-4, atol=2e-5)
        trainer.train_step(batch.with_(advantages=torch.ones(batch.tokens_total), old_logprobs=own))
