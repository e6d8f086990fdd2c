"""Requests that go on with a sample, arrive while others run, or are cut."""

from __future__ import annotations

import pytest
import torch

from coalign.backends.engines.request import Request
from coalign.backends.engines.session_driver import generate_responses
from coalign.types import Status
from tests.backends.native import helpers
from tests.backends.native.test_invariance import MODELS

MODEL = helpers.reference(helpers.qwen2())


def continued(asked, answers, length):
    """Requests that go on with every response after its first ``length`` tokens, and what must come of them."""
    requests, rest = [], []
    for request, responses in zip(asked, answers, strict=True):
        for index, whole in enumerate(responses):
            begun = whole.tokens[:length].tolist()
            requests.append(Request(request.prompt + begun, request.group, first=index, generated=length))
            rest.append((whole.tokens[length:], whole.logprobs[length:], whole.status))
    return requests, rest


AGAIN = [pytest.mark.slow, pytest.mark.processors]
QUICK = (("small", 1.0, torch.float32), ("soft_cap", 1.3, torch.float32), ("soft_cap", 1.0, torch.bfloat16))
CASES = [
    pytest.param(MODELS[name], penalty, dtype, id=f"{name}-{penalty}-{dtype}", marks=() if quick else AGAIN)
    for name in ("small", "soft_cap")
    for penalty in (1.0, 1.3)
    for dtype in (torch.float32, torch.bfloat16)
    for quick in [(name, penalty, dtype) in QUICK]
]


@pytest.mark.parametrize(("config", "penalty", "dtype"), CASES)
def test_a_sample_goes_on_as_if_it_had_never_stopped(config, dtype, penalty):
    model = helpers.reference(config, dtype=dtype)
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=60, repetition_penalty=penalty)
    asked = helpers.requests(3, samples=2)
    answers = generate_responses(helpers.engine(model), asked, sampling)
    for length in (1, 37):
        requests, rest = continued(asked, answers, length)
        met = helpers.flat(generate_responses(helpers.engine(model, max_sequences=3), requests, sampling))
        for response, (tokens, logprobs, status) in zip(met, rest, strict=True):
            assert torch.equal(response.tokens, tokens)
            assert torch.equal(response.logprobs, logprobs)
            assert response.status == status


def test_a_stop_string_may_begin_before_the_cut():
    text = lambda ids: "".join(chr(97 + i % 26) for i in ids)  # noqa: E731
    [request], sampling = helpers.requests(1), helpers.replace(helpers.SAMPLING, max_new_tokens=30)
    [[free]] = generate_responses(helpers.engine(MODEL), [request], sampling)
    stop = text(free.tokens[8:12].tolist())
    stopping = helpers.replace(sampling, stop=(stop,))
    [[whole]] = generate_responses(helpers.engine(MODEL, decoder=lambda stops: text), [request], stopping)
    assert len(whole.tokens) == 12
    [resumed], _ = continued([request], [[whole]], 10)
    [[rest]] = generate_responses(helpers.engine(MODEL, decoder=lambda stops: text), [resumed], stopping)
    assert rest.tokens.tolist() == whole.tokens[10:].tolist() and rest.status == Status.OK


def test_limits_of_a_request_and_what_they_mean():
    prompt = helpers.requests(1)[0].prompt
    limits = ({}, {"limit": 5}, {"limit": 20}, {"pause": 5}, {"pause": 12})
    requests = [Request(prompt, 0, **each) for each in limits]  # of one group: the same random numbers
    found = helpers.flat(generate_responses(helpers.engine(MODEL), requests, helpers.SAMPLING))
    assert [len(response.tokens) for response in found] == [12, 5, 20, 5, 12]
    assert [response.status == Status.PARTIAL for response in found] == [False, False, False, True, False]
    assert {response.status for response in found} == {Status.TRUNCATED, Status.PARTIAL}
    assert found[2].tokens[:5].tolist() == found[3].tokens.tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1, 2], 3, generated=2), "2 of 2 tokens are begun"),
        (Request([1, 2, 3], 3, samples=2, generated=1), "of 2 samples"),
        (Request([1] * 15, 3, generated=12), "no token to generate: 12 are begun"),
    ],
)
def test_impossible_continuations_are_refused(request_, message):
    with pytest.raises(ValueError, match=f"group 3.*{message}"):
        generate_responses(helpers.engine(MODEL), [request_], helpers.SAMPLING)


def ended_early(**settings):
    """Some tokens that end responses, so that lengths differ."""
    return helpers.engine(MODEL, end_tokens=range(0, 160, 9), **settings)


def test_enough_groups_end_the_call():
    asked = helpers.requests(8, samples=3)
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=80)
    whole = generate_responses(ended_early(), asked, sampling)
    met = generate_responses(ended_early(), asked, sampling, min_groups=3)
    complete = [all(r.status != Status.PARTIAL for r in responses) for responses in met]
    assert 3 <= sum(complete) < 8
    cut = 0
    for responses, expected in zip(met, whole, strict=True):
        for response, full in zip(responses, expected, strict=True):
            length = len(response.tokens)
            assert torch.equal(response.tokens, full.tokens[:length])
            assert torch.equal(response.logprobs, full.logprobs[:length])
            assert (response.status == Status.PARTIAL) == (length < len(full.tokens))
            cut += response.status == Status.PARTIAL
    assert cut
    again = generate_responses(ended_early(), asked, sampling, min_groups=3)
    assert [r.tokens.tolist() for r in helpers.flat(again)] == [r.tokens.tolist() for r in helpers.flat(met)]


def test_enough_of_what_has_not_started_is_nothing():
    asked = helpers.requests(3, samples=2)
    narrow = helpers.engine(MODEL, max_sequences=1)
    met = helpers.flat(generate_responses(narrow, asked, helpers.SAMPLING, min_groups=1))
    assert [len(r.tokens) for r in met] == [12, 12, 0, 0, 0, 0]
    none = helpers.flat(generate_responses(helpers.engine(MODEL), asked, helpers.SAMPLING, min_groups=0))
    assert all(len(r.tokens) == 0 and r.status == Status.PARTIAL for r in none)


def run_with_arrivals(asked, after, sampling=helpers.SAMPLING, **settings):
    """Submit the requests one by one, ``after`` steps apart: {(group, index): response}, and the run."""
    engine, answers = helpers.engine(MODEL, **settings), {}
    with engine.open(sampling) as run:
        waiting = list(asked)
        while waiting or run.unfinished:
            if waiting:
                helpers.submit(run, waiting.pop(0), answers)
            helpers.step(engine, run, after)
    return answers, run


@pytest.mark.parametrize(
    ("settings", "penalty", "after"),
    [({}, 1.0, 1), ({"max_sequences": 3}, 1.3, 4), ({"kv_tokens": 120}, 1.3, 1), ({"kv_tokens": 60}, 1.0, 4)],
)
def test_requests_may_arrive_while_others_run(settings, penalty, after):
    sampling = helpers.replace(helpers.SAMPLING, repetition_penalty=penalty)
    asked = helpers.requests(9, samples=2)  # of 3 to 40 tokens: the cache has to grow in both directions
    expected = generate_responses(helpers.engine(MODEL), asked, sampling)
    answers, run = run_with_arrivals(asked, after, sampling, **settings)
    helpers.check_same([answers[key] for key in sorted(answers)], helpers.flat(expected))
    held = run.slots.count * run.slots.longest
    assert held <= settings.get("kv_tokens", held)
    assert run.slots.count <= settings.get("max_sequences", 64)
