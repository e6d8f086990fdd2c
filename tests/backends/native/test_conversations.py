"""Requests of one conversation after another: what is kept between two turns, and that it never shows in the tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coalign.backends.engines.request import Request
from coalign.backends.engines.session_driver import generate_responses
from coalign.types import Status
from tests.backends.native import helpers
from tests.backends.native.test_invariance import MODELS

MODEL = helpers.reference(helpers.qwen2())
AGAIN = [pytest.mark.slow, pytest.mark.processors]  # the same on another parameter
ANSWER, SAID = 5, 7  # tokens of each turn, and of what is said to the policy after it


def said(group: int, turn: int) -> list[int]:
    return [(31 * group + 17 * turn + i) % helpers.VOCABULARY for i in range(SAID)]


class Talk:
    """A conversation of several turns with an open run."""

    def __init__(self, run, opening: Request, turns: int = 3) -> None:
        self.run, self.request, self.turns = run, opening, turns
        self.logprobs: list[int] = []
        self.tokens = list(opening.prompt)
        self.next = Request(opening.prompt, opening.group, limit=ANSWER, first_turn=len(opening.prompt))
        self.ask()

    def ask(self) -> None:
        self.run.submit(self.next, self.hear)

    def hear(self, place, response) -> None:
        assert response.status == Status.TRUNCATED
        self.turns -= 1
        self.logprobs += response.logprobs.view(torch.int32).tolist()
        self.tokens += [*response.tokens.tolist(), *said(self.request.group, self.turns)]
        self.next = replace(self.next, prompt=list(self.tokens))
        if self.turns:
            self.ask()
        else:
            self.run.forget(self.request.group, 0)


def talk(openings, model=MODEL, sampling=helpers.SAMPLING, before_step=lambda step, run: None, **settings):
    """{group: (tokens, log-probs as bits)} of conversations that run side by side, and the run."""
    engine = helpers.engine(model, **settings)
    with engine.open(sampling) as run:
        talks = [Talk(run, opening) for opening in openings]
        step = 0
        while run.unfinished:
            before_step(step, run)
            helpers.step(engine, run, 1)
            step += 1
        helpers.step(engine, run, 1)  # hears of those that are over
    return {t.request.group: (t.tokens, t.logprobs) for t in talks}, run


def drop_everything(step, run):
    with run.engine.stepping():
        for sequence in run.slots.kept:
            run.slots.remove(sequence)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(MODELS["small"], torch.float32, id="sdpa-float32"),
        pytest.param(MODELS["soft_cap"], torch.bfloat16, id="soft_cap-bfloat16"),
        pytest.param(MODELS["small"], torch.bfloat16, id="sdpa-bfloat16", marks=AGAIN),
        pytest.param(MODELS["soft_cap"], torch.float32, id="soft_cap-float32", marks=AGAIN),
    ],
)
def test_what_is_kept_does_not_change_a_bit(config, dtype):
    model, openings = helpers.reference(config, dtype=dtype), helpers.requests(5)
    sampling = helpers.replace(helpers.SAMPLING, repetition_penalty=1.3)
    expected, forgetful = talk(openings, model, sampling, drop_everything)
    assert forgetful.tokens_kept == 0
    for settings in ({}, {"max_sequences": 3}, {"kv_tokens": 150}, {"prefill_tokens": 8}):
        met, run = talk(openings[::-1], model, sampling, **settings)
        assert met == expected, settings
        assert run.tokens_prefilled + run.tokens_kept == forgetful.tokens_prefilled


def test_a_turn_prefills_what_is_new():
    """The last token of an answer was never fed, so it is computed together with what is said."""
    openings = helpers.requests(5)
    opened = sum(len(request.prompt) for request in openings)
    _, run = talk(openings)
    assert run.tokens_prefilled == opened + 5 * 2 * (1 + SAID)
    assert run.tokens_kept == 5 * (ANSWER - 1 + 2 * ANSWER + SAID - 1) + 2 * opened
    assert not run.slots.active and not run.slots.kept


def test_a_slot_that_is_needed_is_given_away():
    _, run = talk(helpers.requests(6), max_sequences=1)
    assert run.slots.count == 1
    assert run.tokens_kept > 0  # the turn that comes next goes on before anybody else begins


def test_new_weights_begin_anew():
    """In the middle of a turn: nothing of what the old ones computed is there for the next."""
    other = helpers.reference(MODEL.config, seed=1)

    def change(step, run):
        if step == ANSWER + 1:  # in the middle of the second turn
            run.engine.load_weights(other.state_dict().items(), version=1, adopt=True)

    def forgetful(step, run):
        change(step, run)
        drop_everything(step, run)

    openings = helpers.requests(4)
    expected, cold = talk(openings, before_step=forgetful)
    met, run = talk(openings, before_step=change)
    assert met == expected
    opened = sum(len(request.prompt) for request in openings)
    second = opened + 4 * (ANSWER + SAID)
    assert run.tokens_prefilled == opened + 4 * (1 + SAID) + second + 4 * (ANSWER + SAID)
    assert cold.tokens_prefilled == opened + second + second + 4 * (ANSWER + SAID)


def test_another_history_is_another_conversation():
    openings = helpers.requests(1)
    engine = helpers.engine(MODEL)
    heard = []
    with engine.open(helpers.SAMPLING) as run:
        prompt = openings[0].prompt
        for asked in (prompt, [*prompt, 1, 2, 3]):
            run.submit(
                Request(asked, 0, limit=3, first_turn=len(prompt)), lambda place, response: heard.append(response)
            )
            helpers.step(engine, run)
    assert run.tokens_kept == 0
    request = Request([*prompt, 1, 2, 3], 0, limit=3, first_turn=len(prompt))
    [[alone]] = generate_responses(helpers.engine(MODEL), [request], helpers.SAMPLING)
    assert torch.equal(heard[1].logprobs, alone.logprobs)


def test_impossible_conversations_are_refused():
    wrong = {"first_turn": 0}, {"first_turn": 3}, {"samples": 2, "first_turn": 2}
    for request in (Request([1, 2], 3, **changes) for changes in wrong):
        with pytest.raises(ValueError, match="group 3"):
            generate_responses(helpers.engine(MODEL), [request], helpers.SAMPLING)
