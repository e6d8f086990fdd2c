"""Flash attention over the slots of the cache. It runs on CUDA alone: here by a kernel from torch's documentation."""

from __future__ import annotations

import pytest
import torch

from coalign.backends.engines.native import cached_attention as attention
from coalign.backends.engines.session_driver import generate_responses
from tests.backends.flash import flash_as_documented
from tests.backends.native import helpers
from tests.backends.native.test_continuing import continued
from tests.backends.native.test_conversations import talk
from tests.backends.native.test_invariance import MODELS

CONFIGS = {
    "plain": MODELS["small"],
    "windowed": helpers.qwen2(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "soft_cap": MODELS["soft_cap"],
}
assert attention.has_varlen(*attention.SLOT_ARGUMENTS)  # of the torch that is locked


@pytest.fixture
def flash(monkeypatch):
    """Call it to compute with flash attention from then on; it returns the list of calls' (rows, most rows)."""

    def begin():
        calls = []

        def count(query, *given, **named):
            calls.append((len(query), given[4]))
            return flash_as_documented(query, *given, **named)

        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", count)
        monkeypatch.setattr(attention, "choose_kernel", lambda dtype, device: "varlen")
        return calls

    return begin


def compare(found, expected):
    for one, other in zip(helpers.flat(found), helpers.flat(expected), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_responses_are_those_of_attention_by_slots(flash, name):
    """One call a layer for all prompts, one for each step; a soft cap has no such kernel."""
    model, layers = helpers.reference(CONFIGS[name]), CONFIGS[name].num_hidden_layers
    asked, sampling = helpers.requests(5, samples=3), helpers.replace(helpers.SAMPLING, max_new_tokens=24)
    expected = generate_responses(helpers.engine(model), asked, sampling)
    made = helpers.engine(model)
    calls = flash()
    compare(generate_responses(made, asked, sampling), expected)
    if name == "soft_cap":
        assert not calls
    else:
        prompts = [rows for rows, most in calls if most > 1]
        assert prompts == [sum(len(request.prompt) for request in asked)] * layers
        assert len(calls) == 24 * layers  # the prompts choose the first token


@pytest.mark.parametrize("length", [1, 13])
def test_a_sample_goes_on(flash, length):
    model = helpers.reference(CONFIGS["windowed"])
    asked, sampling = helpers.requests(3, samples=2), helpers.replace(helpers.SAMPLING, max_new_tokens=24)
    answers = generate_responses(helpers.engine(model), asked, sampling)
    requests, rest = continued(asked, answers, length)
    made = helpers.engine(model, max_sequences=3)
    assert not (calls := flash())
    met = helpers.flat(generate_responses(made, requests, sampling))
    assert calls
    for response, (tokens, logprobs, _) in zip(met, rest, strict=True):
        assert torch.equal(response.tokens, tokens)
        torch.testing.assert_close(response.logprobs, logprobs, rtol=1e-5, atol=2e-5)


def test_a_conversation_finds_its_earlier_turns(flash):
    openings = helpers.requests(4)
    expected, _ = talk(openings)
    calls = flash()
    found, run = talk(openings)
    assert calls and run.tokens_kept > 0
    assert {group: tokens for group, (tokens, _) in found.items()} == {
        group: tokens for group, (tokens, _) in expected.items()
    }
