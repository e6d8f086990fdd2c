"""NativeModule: a Batch of prompts in, a Batch of responses out."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.engines.request import _StopFinder, begin_samples
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import Status
from tests.backends import batches
from tests.conformance.engines import build
from tests.tiny import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def module(directory, *, samples=1, seed=0, **config) -> NativeModule:
    context = Context(samples_per_prompt=samples, seed=seed)
    return build("native", directory, context, **{"sampling": {"max_new_tokens": 8}} | config)


def prompts() -> Batch:
    return batches.prompts(5, 3, 9)


def test_nothing_is_loaded_before_it_is_needed(directory):
    rollout = module(directory)
    assert all(p.is_meta for p in rollout.engine.model.module.parameters())
    trainer = AutoModelForCausalLM.from_pretrained(directory)
    rollout.load_weights(trainer.named_parameters(), version=5, adopt=True)
    out = rollout.generate(prompts())
    assert set(out["versions"][out["loss_mask"]].tolist()) == {5}
    parameter = rollout.engine.model.module.get_parameter("model.norm.weight")
    assert parameter.data_ptr() == trainer.model.norm.weight.data_ptr()


def test_random_weights_are_drawn_from_the_seed(directory):
    first, second, other = (
        module(directory, init="random", seed=seed).generate(prompts(), temperature=0.0) for seed in (1, 1, 2)
    )
    assert torch.equal(first["rollout_logprobs"], second["rollout_logprobs"])
    assert first["rollout_logprobs"].tolist() != other["rollout_logprobs"].tolist()


def test_ends_come_from_generation_config_config_and_tokenizer(tmp_path):
    tiny_model_dir(tmp_path, eos_token_id=[3, 4])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert module(tmp_path).engine.end_tokens == {3, 4, 5, tiny_tokenizer().eos_token_id}


def test_no_sample_is_longer_than_what_others_take_at_once(directory):
    sampling = {"max_new_tokens": 40}
    whole = module(directory, sampling=sampling).generate(prompts())
    longest = int(whole.lengths.max()) - 3
    out = build("native", directory, Context(sample_tokens=longest), sampling=sampling).generate(prompts())
    assert out.lengths.tolist() == whole.lengths.clamp(max=longest).tolist()
    cut = out.lengths < whole.lengths
    assert cut.any() and (out["status"][cut] == Status.TRUNCATED).all()
    made = build("native", directory, Context(sample_tokens=int(prompts().lengths.max())), sampling=sampling)
    with pytest.raises(ValueError, match=r"has \d+ tokens, .*data.max_prompt_tokens"):
        made.generate(prompts())


@pytest.mark.parametrize(
    ("stop", "found"),
    [("e", 6), ("end", None), ("|>", None), ("<|im_end|>", 4), ("<|im_end|>\n", 5), ("abc\n", 5)],
)
def test_stops_do_not_read_the_names_of_special_tokens(directory, stop, found):
    made = module(directory)
    finder = _StopFinder([stop], made.decoder([stop]))
    tokens = made.tokenizer("abc<|im_end|>\ne")["input_ids"]
    assert len(tokens) == 6
    assert next((i for i, token in enumerate(tokens, 1) if finder.push(token)), None) == found


def test_what_does_not_exist_is_named(directory):
    with pytest.raises(ValidationError, match="temprature"):
        module(directory).generate(prompts(), temprature=0.5)
    with pytest.raises(ValueError, match="/nowhere/model"):
        module("/nowhere/model")


COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "versions", "index", "prompt_length", "status")


def test_what_has_ended_stays_and_what_has_not_goes_on_with_new_weights(directory):
    rollout = module(directory, samples=2)
    cut = rollout.generate(prompts(), round_tokens=3)
    ended = cut.with_(status=torch.tensor([0, 3, 3, 3, 1, 3], dtype=torch.uint8))
    rollout.load_weights([], version=5)
    out = rollout.generate(ended)
    assert (out.lengths - cut.lengths).tolist() == [0, 5, 5, 5, 0, 5]
    assert out["status"].tolist() == [0, 1, 1, 1, 1, 1]
    versions = [row["versions"][row["loss_mask"]].tolist() for row in out.rows()]
    assert versions[0] == [0] * 3 and versions[1] == [0] * 3 + [5] * 5


def test_prompts_and_samples_may_go_together(directory):
    rollout = module(directory, samples=2)
    cut = rollout.generate(prompts().slice(0, 1), round_tokens=3)
    joined = Batch.concat([cut, begin_samples(prompts().slice(1, 3), 2)])
    out, whole = rollout.generate(joined), rollout.generate(prompts())
    for name in COLUMNS:
        assert torch.equal(out[name], whole[name]), name


def test_min_complete_is_a_share_of_the_groups(directory):
    rollout = module(directory, samples=2, native={"max_sequences": 2})
    out = rollout.generate(prompts(), min_complete=1 / 3)
    assert out["status"].tolist() == [1, 1, 3, 3, 3, 3]
    again = rollout.generate(out, min_complete=1 / 3)  # one is complete already
    assert torch.equal(again["tokens"], out["tokens"])
    more = rollout.generate(out, min_complete=2 / 3)
    assert more["status"].tolist() == [1, 1, 1, 1, 3, 3]
