"""The circuit breaker, on a clock of its own."""

import pytest

from coalign_graders.services.remote import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(3, 10.0, clock)


def fail(breaker, times):
    return [breaker.failed(f"no answer {i}") for i in range(times)]


def test_failures_in_a_row_open_it(breaker):
    assert fail(breaker, 2) == [False, False] and breaker.admits()
    breaker.succeeded()
    assert fail(breaker, 3) == [False, False, True]
    assert not breaker.admits() and (breaker.streak, breaker.last, breaker.left) == (3, "no answer 2", 10.0)


def test_after_the_pause_one_call_is_let_through(breaker, clock):
    fail(breaker, 3)
    clock.now += 9.9
    assert not breaker.admits() and breaker.left == pytest.approx(0.1)
    clock.now += 0.2
    assert breaker.admits() and not breaker.admits()


def test_a_trial_that_succeeds_closes_it(breaker, clock):
    fail(breaker, 3)
    clock.now += 10
    assert breaker.admits()
    breaker.succeeded()
    assert breaker.admits() and breaker.admits() and breaker.streak == 0


def test_a_trial_that_fails_opens_it_for_another_pause(breaker, clock):
    fail(breaker, 3)
    clock.now += 10
    assert breaker.admits() and breaker.failed("still down")
    assert not breaker.admits() and breaker.left == 10.0
    clock.now += 10
    assert breaker.admits()


def test_a_late_success_of_a_call_begun_before_closes_it(breaker):
    fail(breaker, 3)
    breaker.succeeded()
    assert breaker.admits()
