"""What follows from the contract of engines, with one that computes nothing."""

from __future__ import annotations

import pytest

from coalign.backends.engines.contract import GenerationSession, InferenceEngine
from coalign.backends.engines.request import PartialResponse, Request
from coalign.backends.engines.session_driver import generate_responses
from coalign.config.schema import SamplingConfig
from coalign.types import Status

SAMPLING = SamplingConfig(max_new_tokens=4)


class CountingSession(GenerationSession):
    """Each step is the next number, for every sample; samples of group ``loses`` vanish."""

    active = ()

    def take_active(self):
        taken, self.active = self.active, []
        return taken

    def step(self):
        while self.arrived:
            submitted = self.arrived.popleft()
            new = [PartialResponse(submitted, offset, None) for offset in range(submitted.request.samples)]
            self.active = [*self.active, *new]
        for answer in self.active:
            status = Status.PARTIAL if answer.submitted.cut else self.record(answer, len(answer.tokens), -1.0)
            if status is not None:
                self.active = [other for other in self.active if other is not answer]
                if answer.submitted.request.group != self.engine.loses:
                    self.finish(answer, status)


class CountingEngine(InferenceEngine):
    session_class = CountingSession
    version = 3
    vocabulary, context = 100, None
    loses = -1
    loaded = ()

    def _load(self, weights, *, adopt):
        self.loaded = [*weights]


def test_answers_come_in_the_order_of_what_was_asked():
    asked = [Request([1], 5, samples=2, limit=3), Request([1], 4, samples=1)]
    first, second = generate_responses(CountingEngine(), asked, SAMPLING)
    assert [answer.tokens.tolist() for answer in (*first, *second)] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert {answer.status for answer in (*first, *second)} == {Status.TRUNCATED}
    assert second[0].versions.tolist() == [3] * 4 and second[0].logprobs.tolist() == [-1.0] * 4


def test_min_groups_cuts_the_others():
    asked = [Request([1], 0, limit=2), Request([1], 1, limit=4), Request([1], 2, limit=4)]
    answers = generate_responses(CountingEngine(), asked, SAMPLING, min_groups=1)
    assert [answer.status for [answer] in answers] == [Status.TRUNCATED, Status.PARTIAL, Status.PARTIAL]
    assert [len(answer.tokens) for [answer] in answers] == [2, 2, 2]


def test_a_response_that_the_engine_lost_is_an_error():
    engine = CountingEngine()
    engine.loses = 7
    with pytest.raises(RuntimeError, match="the engine returned 1 of 3 responses"):
        generate_responses(engine, [Request([1], 6), Request([1], 7, samples=2)], SAMPLING)
    engine.loses = -1
    assert len(generate_responses(engine, [Request([1], 6)], SAMPLING)) == 1


def test_a_version_counts_once_its_weights_are_there():
    engine = CountingEngine()
    with pytest.raises(ZeroDivisionError):
        engine.load_weights((("name", 1 / 0) for _ in range(1)), version=4, adopt=False)
    assert engine.version == 3
    engine.load_weights([("name", None)], version=4, adopt=False)
    assert engine.version == 4 and engine.loaded == [("name", None)]
