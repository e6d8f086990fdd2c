"""Rotary embeddings that change with the longest sequence of a row: right up to their limit, refused above it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from coalign.backends.attention import register_attention
from coalign.backends.engines.request import Request
from coalign.backends.engines.session_driver import generate_responses
from coalign.backends.hf.heads import LanguageModel
from coalign.backends.pretrained import read_config, read_context_length, read_rope_limit
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.launch.check import check
from coalign.launch.data_load import load_data
from coalign.launch.plan import prepare
from coalign_vllm.module import VLLMModule
from tests.backends.native import helpers
from tests.backends.test_fsdp import module
from tests.conformance.engines import expected_logprobs
from tests.launch.test_validate import configured
from tests.tiny import tiny_model_dir

LIMIT = 24
ROPES = {
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT}
    | {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 3.0, 9.0, 30.0]},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.fixture(scope="module", params=ROPES)
def path(request, tmp_path_factory):
    longest = 4 * LIMIT if request.param == "longrope" else LIMIT
    directory = tmp_path_factory.mktemp("model")
    settings = {"max_position_embeddings": longest, "initializer_range": 0.3}
    return str(tiny_model_dir(directory, family="llama", rope_parameters=ROPES[request.param], **settings))


def rows(*lengths):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (sum(lengths),), generator=generator, dtype=torch.int32)
    batch = Batch(torch.tensor(lengths), {"tokens": tokens}, {"group": torch.arange(len(lengths))})
    return batch.with_(loss_mask=torch.ones(len(tokens), dtype=torch.bool).index_fill(0, batch.offsets[:-1], False))


def test_a_trainer_computes_up_to_the_limit_and_refuses_more(path):
    trainer = module(path)
    kind, limit = read_rope_limit(trainer.model.model.config)
    assert limit == LIMIT == read_context_length(read_config(ModelConfig(load=path)))
    batch = rows(5, LIMIT, 9)
    found = trainer.forward_step(batch, into="logprobs")["logprobs"]
    expected = expected_logprobs(AutoModelForCausalLM.from_pretrained(path).eval(), batch, 1.0)
    torch.testing.assert_close(found[batch["loss_mask"]], expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=rf"`{kind}` change above {LIMIT} tokens .* one of {LIMIT + 1}"):
        trainer.forward_step(rows(5, LIMIT + 1))


def test_the_native_engine_ends_sequences_at_the_limit(path):
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    engine = helpers.engine(model)
    prompts = [Request([3, 1, 4], 0, 1), Request(list(range(LIMIT - 2)), 1, 1)]
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=2 * LIMIT)
    responses = helpers.flat(generate_responses(engine, prompts, sampling))
    assert [len(response.tokens) for response in responses] == [LIMIT - 3, 2]
    for request, response in zip(prompts, responses, strict=True):
        expected = helpers.reference_logprobs(model, request.prompt, response.tokens)
        torch.testing.assert_close(response.logprobs, expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=f"has {LIMIT} tokens; the model's context is {LIMIT}"):
        generate_responses(engine, [Request([1] * LIMIT, 0, 1)], helpers.SAMPLING)


def test_vllm_may_not_get_longer_sequences(path):
    kind, _ = read_rope_limit(read_config(ModelConfig(load=path)))
    if kind == "dynamic":
        with pytest.raises(
            ValueError, match=r"models\.policy\.load: vLLM changes .* type `dynamic` .* use `module: native`"
        ):
            VLLMModule.check_architecture(ModelConfig(load=path, vllm={"max_model_len": LIMIT}), "policy")
        return
    VLLMModule.check_architecture(ModelConfig(load=path, vllm={"max_model_len": LIMIT}), "policy")
    for options in ({}, {"max_model_len": LIMIT + 1}):
        with pytest.raises(
            ValueError, match=rf"models\.policy\.vllm\.max_model_len: .* above {LIMIT}; set that or less"
        ):
            VLLMModule.check_architecture(ModelConfig(load=path, vllm=options), "policy")


@pytest.mark.parametrize("given", ["null", str(LIMIT + 1)])
def test_data_that_may_be_longer_is_refused_before_anything_loads(path, tmp_path, given):
    quiet = cast(Any, SimpleNamespace(show=lambda *_: None))
    config = configured(tmp_path, "sft", f"models.trainer.load={path}", f"data.max_tokens={given}")
    for start in (lambda: check(config, quiet), lambda: load_data(prepare(config))):
        with pytest.raises(ValueError, match=rf"data\.max_tokens is .* models\.trainer .* set it to {LIMIT} or less"):
            start()


def test_the_probe_sees_positions_that_depend_on_the_longest_sequence(path):
    """Also of a kind that config.json does not name."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register_attention())
    LanguageModel(model).check()
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(x, position_ids * (1 + (position_ids.max() > 9)))
    with pytest.raises(NotImplementedError, match="positions depend on the longest sequence of a row"):
        LanguageModel(model).check()
