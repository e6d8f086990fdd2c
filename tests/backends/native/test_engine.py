"""What the engine does beside arithmetic: ends, slots, pauses, weights, errors."""

from __future__ import annotations

import pytest

from coalign.backends.engines.contract import GenerationSession
from coalign.backends.engines.native.native_model import NativeModel
from coalign.backends.engines.request import Request
from coalign.backends.engines.session_driver import generate_responses
from coalign.types import Status
from tests.backends.native import helpers

MODEL = helpers.reference(helpers.qwen2())


def test_a_prompt_is_computed_once_for_its_samples(monkeypatch):
    computed = []
    forward = NativeModel.forward

    def counted(self, tokens, positions, kv, rows, spans=()):
        if rows is not None:
            computed.append(len(rows))
        return forward(self, tokens, positions, kv, rows, spans)

    engine = helpers.engine(MODEL, max_sequences=3)
    monkeypatch.setattr(NativeModel, "forward", counted)
    generate_responses(engine, helpers.requests(2, samples=7), helpers.SAMPLING)
    assert sum(computed) == 2


def test_responses_stop_at_the_models_context():
    context = MODEL.config.max_position_embeddings
    near, at = Request([1] * (context - 3), 0), Request([1] * context, 1)
    assert generate_responses(helpers.engine(MODEL), [], helpers.SAMPLING) == []
    [[response]] = generate_responses(helpers.engine(MODEL), [near], helpers.SAMPLING)
    assert len(response.tokens) == 3 and response.status == Status.TRUNCATED
    with pytest.raises(ValueError, match=f"has {context} tokens; the model's context is {context}"):
        generate_responses(helpers.engine(MODEL), [at], helpers.SAMPLING)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens"),
        ([3, helpers.VOCABULARY], "token id outside"),
        ([-1], "token id outside"),
        ([1] * 60, "kv_tokens"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        generate_responses(helpers.engine(MODEL, kv_tokens=64), [Request(prompt, 5)], helpers.SAMPLING)


def test_progress_counts_responses_and_tokens():
    seen = []
    engine = helpers.engine(MODEL)
    generate_responses(engine, helpers.requests(3, samples=2), helpers.SAMPLING, lambda *now: seen.append(now))
    assert seen[-1] == (6, 6, 72)
    assert seen == sorted(seen)


def test_weights_that_are_not_numbers_are_an_error():
    broken = helpers.reference(helpers.qwen2())
    broken.model.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"version 0, groups \[0, 1\]"):
        generate_responses(helpers.engine(broken), helpers.requests(2), helpers.SAMPLING)


def test_a_repetition_penalty_discourages_prompt_and_response():
    strong = helpers.replace(helpers.SAMPLING, temperature=0.0, repetition_penalty=1e6)
    asked = helpers.requests(4)
    for request, [response] in zip(asked, generate_responses(helpers.engine(MODEL), asked, strong), strict=True):
        tokens = response.tokens.tolist()
        assert len(set(tokens)) == len(tokens)
        assert not set(tokens) & set(request.prompt)


def test_a_response_that_the_engine_lost_is_an_error(monkeypatch):
    engine, finish = helpers.engine(MODEL), GenerationSession.finish

    def lose(session, answer, status):
        if answer.submitted.request.group != 1:
            finish(session, answer, status)

    with monkeypatch.context() as patch:
        patch.setattr(GenerationSession, "finish", lose)
        with pytest.raises(RuntimeError, match="the engine returned 1 of 3 responses"):
            generate_responses(engine, [Request([1], 0), Request([1], 1, samples=2)], helpers.SAMPLING)
    assert len(generate_responses(engine, [Request([1], 1)], helpers.SAMPLING)) == 1


def test_a_version_counts_once_its_weights_are_there():
    engine = helpers.engine(MODEL)
    with pytest.raises(ZeroDivisionError):
        engine.load_weights((("name", 1 / 0) for _ in range(1)), version=4, adopt=False)
    assert engine.version == 0
    engine.load_weights(MODEL.state_dict().items(), version=4, adopt=True)
    assert engine.version == 4
