"""The engines of this process on the simulated device: the conformance suite, and the tokens of the CPU (those of one
family by other settings: test_graphs.py)."""

import pytest
import torch

from coalign.roles import Context
from tests.conformance.engines import build, model_dir, prompts
from tests.conformance.test_engines import *  # noqa: F403
from tests.conformance.test_rollout import test_sampled_logprobs_are_the_trainers  # noqa: F401
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.device
CARD = "standin:0"


def on_card(**settings):
    return Context(**{"model": "policy", "device": CARD, "samples_per_prompt": 3, "seed": 5} | settings)


@pytest.fixture
def device():
    return CARD


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["native", "transformers"])
def engine(request, directory):
    module = build(request.param, directory, on_card())
    yield module
    module.close()


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
def test_other_families_choose_the_same_tokens(tmp_path, family):
    path = tiny_model_dir(tmp_path, family=family)
    there, here = (build("native", path, context).generate(prompts()) for context in (on_card(), None))
    assert torch.equal(there["tokens"], here["tokens"])


def test_a_cache_that_is_too_small_for_all_makes_requests_wait(directory):
    few = build("native", directory, on_card(), native={"max_sequences": 2, "prefill_tokens": 32})
    assert torch.equal(few.generate(prompts())["tokens"], build("native", directory).generate(prompts())["tokens"])
