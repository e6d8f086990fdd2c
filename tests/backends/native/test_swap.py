"""New weights between two steps of open sessions: what is computed again, what is kept, and what stays exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from coalign.backends.engines.request import Request
from coalign.backends.engines.session_driver import generate_responses
from coalign.types import Status
from tests.backends.native import helpers
from tests.backends.native.helpers import step

OLD = helpers.reference(helpers.qwen2())
NEW = helpers.reference(helpers.qwen2(), seed=1)
SWAP = 5  # steps before the new weights come


def load_new(engine) -> None:
    engine.load_weights(NEW.state_dict().items(), version=1, adopt=True)


def swap(asked, sampling=helpers.SAMPLING, *, recompute=True, **settings):
    """{(group, index): response} of requests whose weights change after SWAP steps, and the session."""
    engine, answers = helpers.engine(OLD, **settings), {}
    engine.recomputes_kv = recompute
    with engine.open(sampling) as session:
        for request in asked:
            helpers.submit(session, request, answers)
        step(engine, session, SWAP)
        load_new(engine)
        step(engine, session)
    return answers, session


def go_on(asked, answers, sampling=helpers.SAMPLING, **settings):
    """Yield (response, the tokens of the old weights, what an engine of new weights gives behind them)."""
    for request in asked:
        for index in range(request.samples):
            met = answers[request.group, index]
            begun = int((met.versions == 0).sum())
            prompt = request.prompt + met.tokens[:begun].tolist()
            following = Request(prompt, request.group, first=index, generated=begun)
            [[rest]] = generate_responses(helpers.engine(NEW, **settings), [following], sampling)
            yield met, begun, rest


@pytest.mark.parametrize(
    ("settings", "penalty"),
    [
        ({"kv_tokens": 120}, 1.0),
        ({}, 1.3),
        pytest.param({"max_sequences": 3}, 1.0, marks=pytest.mark.slow),
    ],
)
def test_recomputed_samples_go_on_as_a_fresh_engine_would(settings, penalty):
    asked, sampling = helpers.requests(3, samples=2), helpers.replace(helpers.SAMPLING, repetition_penalty=penalty)
    undisturbed = generate_responses(helpers.engine(OLD), asked, sampling)
    answers, _ = swap(asked, sampling, **settings)
    found = set()
    for met, begun, rest in go_on(asked, answers, sampling):
        assert met.tokens[begun:].tolist() == rest.tokens.tolist() and len(met.tokens) == 12
        assert torch.equal(met.logprobs[begun:], rest.logprobs)
        assert met.versions.tolist() == [0] * begun + [1] * (12 - begun) and met.status == rest.status
        found.add(begun)
    assert SWAP + 1 in found and found <= {0, 2, 3, 4, 5, 6}  # the first step chooses two tokens
    for request, responses in zip(asked, undisturbed, strict=True):
        for index, old in enumerate(responses):
            met = answers[request.group, index]
            begun = int((met.versions == 0).sum())
            assert torch.equal(met.tokens[:begun], old.tokens[:begun])
            assert torch.equal(met.logprobs[:begun], old.logprobs[:begun])


def test_kept_keys_and_values_are_another_computation():
    asked = helpers.requests(2, samples=2)
    answers, session = swap(asked, recompute=False)
    differ = 0
    for met, begun, rest in go_on(asked, answers):
        assert met.versions.tolist() == [0] * (SWAP + 1) + [1] * (12 - SWAP - 1)
        differ += not torch.equal(met.logprobs[begun:], rest.logprobs)
    assert differ == 4 and session.tokens_prefilled == sum(len(request.prompt) for request in asked)


def test_two_swaps_leave_one_whole_response():
    [request] = helpers.requests(1)
    engine, answers = helpers.engine(OLD), {}
    engine.recomputes_kv = True
    with engine.open(helpers.SAMPLING) as session:
        helpers.submit(session, request, answers)
        step(engine, session, 2)
        load_new(engine)
        load_new(engine)  # before anything was computed again
        step(engine, session, 2)
        engine.load_weights(OLD.state_dict().items(), version=2, adopt=True)
        step(engine, session)
    [response] = answers.values()
    assert response.versions.tolist() == [0] * 3 + [1] * 3 + [2] * 6


def test_a_stop_string_may_begin_before_the_swap():
    text = lambda ids: "".join(chr(97 + i % 26) for i in ids)  # noqa: E731
    [request], sampling = helpers.requests(1), helpers.replace(helpers.SAMPLING, max_new_tokens=30)
    for first_turn in (None, len(request.prompt)):
        asked = dataclasses.replace(request, first_turn=first_turn)
        free = swap([asked], sampling)[0][0, 0]
        stop = text(free.tokens[SWAP - 1 : SWAP + 3].tolist())  # two tokens of each
        assert stop not in text(free.tokens[: SWAP + 2].tolist())
        stopping = helpers.replace(sampling, stop=(stop,))
        met = swap([asked], stopping, decoder=lambda stops: text)[0][0, 0]
        assert met.tokens.tolist() == free.tokens[: SWAP + 3].tolist() and met.status == Status.OK


def test_limits_count_the_tokens_before_the_swap():
    prompt, context = helpers.requests(1)[0].prompt, OLD.config.max_position_embeddings
    asked = [
        Request(prompt, 0, limit=7),
        Request(prompt, 1, pause=9),
        Request(prompt, 2, limit=8, first_turn=len(prompt)),
        Request([*prompt, 5, 6], 3, generated=2),
        Request([1] * (context - 8), 4),
    ]
    answers, _ = swap(asked)
    assert [len(answers[group, 0].tokens) for group in range(5)] == [7, 9, 8, 10, 8]
    ends = [Status.TRUNCATED, Status.PARTIAL, *[Status.TRUNCATED] * 3]
    assert [answers[group, 0].status for group in range(5)] == ends


def test_a_request_is_cut_by_its_handle_after_a_swap():
    engine, answers = helpers.engine(OLD), {}
    engine.recomputes_kv = True
    first, second, third = helpers.requests(3, samples=2)
    with engine.open(helpers.SAMPLING) as session:
        handles = [helpers.submit(session, request, answers) for request in (first, second, third)]
        step(engine, session, 2)
        session.cut(handles[2])  # not handled before the swap
        load_new(engine)
        step(engine, session, 1)
        session.cut(handles[1])
        step(engine, session)
    assert [len(answers[0, place].tokens) for place in (0, 1)] == [12, 12]
    for group, versions in ((1, [0] * 3 + [1] * 2), (2, [0] * 3)):
        for place in (0, 1):
            assert answers[group, place].versions.tolist() == versions
            assert answers[group, place].status == Status.PARTIAL
    prefilled, kept = handles[0].prompt_tokens
    assert (prefilled, kept) == (len(first.prompt) + 2 * (len(first.prompt) + 3), 0)


def test_samples_that_have_begun_go_before_those_that_wait():
    engine, order = helpers.engine(OLD, max_sequences=2), []
    engine.recomputes_kv = True
    with engine.open(helpers.SAMPLING) as session:
        for request in helpers.requests(4):
            session.submit(request, lambda place, response, group=request.group: order.append(group))
        assert session.unstarted == 4
        step(engine, session, 3)
        assert session.unstarted == 2
        load_new(engine)
        step(engine, session, 1)
        assert session.unstarted == 2
        step(engine, session)
    assert order == [0, 1, 2, 3] and session.unstarted == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_a_version_that_comes_again_finds_nothing_of_other_weights(recompute):
    """What a conversation keeps between two turns, and the prompt of samples that wait."""
    prompt = helpers.requests(1)[0].prompt
    engine, answers = helpers.engine(OLD, max_sequences=1), []
    engine.recomputes_kv = recompute
    ask = lambda session, request: session.submit(request, lambda place, response: answers.append(response))  # noqa: E731
    with engine.open(helpers.SAMPLING) as session:
        ask(session, Request(prompt, 0, limit=3, first_turn=len(prompt)))
        step(engine, session)
        engine.load_weights(NEW.state_dict().items(), version=0, adopt=True)
        ask(session, Request([*prompt, *answers[0].tokens.tolist(), 4], 0, limit=3, first_turn=len(prompt)))
        step(engine, session)
        assert session.tokens_kept == 0
        ask(session, Request(prompt, 1, samples=2, limit=3))
        step(engine, session, 1)
        engine.load_weights(OLD.state_dict().items(), version=0, adopt=True)
        step(engine, session)
    [[_, second]] = generate_responses(helpers.engine(OLD), [Request(prompt, 1, samples=2, limit=3)], helpers.SAMPLING)
    assert torch.equal(answers[-1].logprobs, second.logprobs)


def test_sessions_take_turns_and_neither_shows_in_the_other():
    engine, answers = helpers.engine(OLD), ({}, {})
    greedy = helpers.replace(helpers.SAMPLING, temperature=0.0)
    asked = helpers.requests(3, samples=2)
    expected = [generate_responses(helpers.engine(OLD), asked, sampling) for sampling in (helpers.SAMPLING, greedy)]
    with engine.open(helpers.SAMPLING) as one:
        with engine.open(greedy) as other:
            for own, session in zip(answers, (one, other), strict=True):
                for request in asked:
                    helpers.submit(session, request, own)
            for _ in range(11):
                for session in (one, other):
                    step(engine, session, 1)
            assert not other.unfinished and engine.sessions == [one, other]
        assert all(linear.product is not None for linear in engine.model.linears) or engine.model.kernel is None
        again = generate_responses(engine, asked, greedy)
    assert not engine.sessions and all(linear.product is None for linear in engine.model.linears)
    for own, responses in zip(answers, expected, strict=True):
        helpers.check_same([own[key] for key in sorted(own)], helpers.flat(responses))
    assert torch.equal(helpers.flat(again)[0].logprobs, helpers.flat(expected[1])[0].logprobs)
