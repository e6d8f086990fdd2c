"""What follows from the contract of engines, with one that computes nothing."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from coalign.backends.engines.contract import GenerationSession, InferenceEngine
from coalign.backends.engines.request import PartialResponse, Request, SubmittedRequest
from coalign.config.schema import SamplingConfig
from coalign.types import Status

SAMPLING = SamplingConfig(max_new_tokens=4)


class CountingSession(GenerationSession):
    """Each step is the next number, for every sample; samples of group ``loses`` vanish."""

    def __init__(self, sampling, loses):
        super().__init__(max_tokens=None)
        self.sampling, self.loses, self.answers = sampling, loses, []

    @property
    def unfinished(self):
        return bool(self.answers)

    @property
    def unstarted(self):
        return 0

    def take_active(self):
        taken, self.answers = self.answers, []
        return taken

    def requeue(self, requests):
        self.answers = [PartialResponse(request, 0, None) for request in requests] + self.answers

    def submit(self, request, on_done):
        prompt = SubmittedRequest.plan(request, self.sampling, on_done, vocabulary=100, context=None)
        self.answers += [PartialResponse(prompt, place, None) for place in range(request.samples)]
        self.total += request.samples
        return prompt

    def cut_all(self):
        self.cut(*(answer.submitted for answer in self.answers))

    def step(self):
        for answer in list(self.answers):
            status = Status.PARTIAL if answer.submitted.cut else answer.add(len(answer.tokens), -1.0, 3, frozenset())
            if status is not None:
                self.answers.remove(answer)
                if answer.submitted.request.group != self.loses:
                    self.finished += 1
                    answer.submitted.on_done(answer.offset, answer.response(status))


class CountingEngine(InferenceEngine):
    loses = -1
    loaded = ()

    @contextmanager
    def _start_session(self, sampling, on_token):
        yield CountingSession(sampling, self.loses)

    def _load(self, weights, *, adopt):
        self.loaded = [*weights]


def test_answers_come_in_the_order_of_what_was_asked():
    asked = [Request([1], 5, samples=2, limit=3), Request([1], 4, samples=1)]
    first, second = next(CountingEngine().generate(asked, SAMPLING))
    assert [answer.tokens.tolist() for answer in (*first, *second)] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert {answer.status for answer in (*first, *second)} == {Status.TRUNCATED}
    assert second[0].versions.tolist() == [3] * 4 and second[0].logprobs.tolist() == [-1.0] * 4


def test_min_groups_cuts_the_others():
    asked = [Request([1], 0, limit=2), Request([1], 1, limit=4), Request([1], 2, limit=4)]
    answers = next(CountingEngine().generate(asked, SAMPLING, min_groups=1))
    assert [answer.status for [answer] in answers] == [Status.TRUNCATED, Status.PARTIAL, Status.PARTIAL]
    assert [len(answer.tokens) for [answer] in answers] == [2, 2, 2]


def test_a_response_that_the_engine_lost_is_an_error():
    engine = CountingEngine()
    engine.loses = 7
    with pytest.raises(RuntimeError, match="the engine returned 1 of 3 responses"):
        next(engine.generate([Request([1], 6), Request([1], 7, samples=2)], SAMPLING))
    engine.loses = -1
    assert len(next(engine.generate([Request([1], 6)], SAMPLING))) == 1


def test_a_version_counts_once_its_weights_are_there():
    engine = CountingEngine()
    with pytest.raises(ZeroDivisionError):
        engine.load_weights((("name", 1 / 0) for _ in range(1)), version=4, adopt=False)
    assert engine.version == -1
    engine.load_weights([("name", None)], version=4, adopt=False)
    assert engine.version == 4 and engine.loaded == [("name", None)]
