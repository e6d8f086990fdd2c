"""What the engine does beside arithmetic: ends, slots, pauses, weights, errors."""

from __future__ import annotations

import threading

import pytest

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


def test_pause_from_another_thread_holds_generation_between_tokens():
    engine = helpers.engine(MODEL)
    reached, counts = threading.Event(), []

    def note(finished, total, tokens):
        counts.append(tokens)
        reached.set()

    done = []
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=150)
    asked = helpers.requests(2)
    worker = threading.Thread(target=lambda: done.append(generate_responses(engine, asked, sampling, note)))
    worker.start()
    assert reached.wait(20)
    engine.pause()
    [session] = engine.sessions
    held = session.tokens_chosen
    engine.load_weights(MODEL.state_dict().items(), version=4, adopt=True)
    worker.join(0.2)
    assert worker.is_alive() and session.tokens_chosen == held
    engine.resume()
    with pytest.raises(RuntimeError, match="without pause"):
        engine.resume()
    worker.join(60)
    undisturbed = helpers.flat(generate_responses(helpers.engine(MODEL), asked, sampling))
    for response, expected in zip(helpers.flat(done[0]), undisturbed, strict=True):
        assert response.tokens.tolist() == expected.tokens.tolist()
        versions = response.versions.tolist()
        assert versions == [0] * (held // 2) + [4] * (150 - held // 2)


def test_after_a_failed_call_the_engine_still_works():
    engine = helpers.engine(MODEL)
    with pytest.raises(ZeroDivisionError):
        generate_responses(engine, helpers.requests(2), helpers.SAMPLING, lambda *_: 1 // 0)
    assert len(generate_responses(engine, helpers.requests(2), helpers.SAMPLING)) == 2
    assert all(linear.product is None for linear in engine.model.linears)


def test_a_repetition_penalty_discourages_prompt_and_response():
    strong = helpers.replace(helpers.SAMPLING, temperature=0.0, repetition_penalty=1e6)
    asked = helpers.requests(4)
    for request, [response] in zip(asked, generate_responses(helpers.engine(MODEL), asked, strong), strict=True):
        tokens = response.tokens.tolist()
        assert len(set(tokens)) == len(tokens)
        assert not set(tokens) & set(request.prompt)
