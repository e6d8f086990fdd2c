"""Calling people's functions: shapes, concurrency, deadlines, retries, and each way to fail."""

import asyncio
import importlib
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from coalign.rewards.calls import BUGS, GiveUp, RewardCaller, RewardError, RewardFailure, RewardFunction, _read_outcomes
from coalign.rewards.thread_pool import MAX_HUNG
from coalign.services import ServiceError
from tests.rewards.samples import sample

SAMPLES = [sample(f"{g}{i}", group=g, index=i) for g in range(3) for i in range(2)]


@pytest.fixture
def caller():
    caller = RewardCaller()
    yield caller
    caller.close()


def score(caller, fn, samples=SAMPLES, **limits):
    arguments = limits.pop("arguments", {})
    return caller.score([RewardFunction("f", fn, arguments, **({"retries": 0} | limits))], samples)[0]


def values(outcomes):
    return [o.reason if isinstance(o, RewardFailure) else o["reward"] for o in outcomes]


def per_sample(sample, *, plus=0.0):
    return float(sample.response) + plus


async def per_sample_async(s):
    await asyncio.sleep(0)
    return float(s.response)


def per_group(group):
    assert len({s.group for s in group}) == 1 and len(group) == 2
    return [float(s.response) for s in group]


async def per_group_async(group):
    return per_group(group)


def everything(samples):
    assert len(samples) == 6
    return np.array([float(s.response) for s in samples])


class Scorer:
    def __call__(self, sample):
        return float(sample.response)


class AsyncScorer:
    async def __call__(self, sample):
        return float(sample.response)


@pytest.mark.parametrize(
    "fn",
    [
        *(per_sample, per_sample_async, per_group, per_group_async, everything, Scorer(), AsyncScorer()),
        lambda samples: torch.tensor([float(s.response) for s in samples]),
    ],
)
def test_every_shape_of_function(caller, fn):
    assert values(score(caller, fn)) == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
    assert score(caller, fn, samples=[]) == []
    if fn is per_sample:
        assert values(score(caller, fn, arguments={"plus": 1.0}))[:2] == [1.0, 2.0]


@pytest.mark.parametrize("returned", [True, np.float32(1), np.int64(1), torch.tensor(1.0), {"reward": 1, "part": 0.5}])
def test_numbers_of_any_make(caller, returned):
    assert values(score(caller, lambda s: returned)) == [1.0] * 6


def test_further_entries_are_kept(caller):
    assert score(caller, lambda s: {"reward": 0, "part": 0.5})[0] == {"reward": 0.0, "part": 0.5}


@pytest.mark.parametrize(
    ("returned", "reason", "message"),
    [
        (None, "wrong_type", "returned None; expected a number"),
        ("1", "wrong_type", "returned str '1'"),
        ([1.0], "wrong_type", "returned list"),
        (torch.ones(2), "wrong_type", "returned Tensor"),
        (np.ones(1), "wrong_type", "returned ndarray"),
        ({"score": 1.0}, "wrong_type", "without the key 'reward'"),
        (float("nan"), "not_finite", "returned nan"),
        (float("inf"), "not_finite", "returned inf"),
        ({"reward": None, "part": 1.0}, "wrong_type", "returned None"),
        (10**400, "not_finite", "returned"),
        ({"reward": -(10**5000)}, "not_finite", "returned"),
        ({"reward": 10**400, "length": 1.0}, "not_finite", "returned"),
    ],
)
def test_what_is_no_number_fails(caller, returned, reason, message):
    (outcome,) = score(caller, lambda s: returned, SAMPLES[:1])
    assert outcome.reason == reason and message in str(outcome.error)


@pytest.mark.parametrize(
    ("returned", "reasons"),
    [
        ([1.0], ["wrong_length"] * 2),
        ([1.0, 2.0, 3.0], ["wrong_length"] * 2),
        (1.0, ["wrong_type"] * 2),
        ({"reward": 1.0}, ["wrong_type"] * 2),
        ("12", ["wrong_type"] * 2),
        ([0.0, None], [0.0, "wrong_type"]),
        ([float("nan"), 0.5], ["not_finite", 0.5]),
    ],
)
def test_lists_are_checked_entry_by_entry(caller, returned, reasons):
    assert values(score(caller, lambda group: returned, SAMPLES[:2])) == reasons


def raises(sample):
    raise KeyError("nothing here")


async def raises_async(sample):
    raise KeyError("nothing here")


def exits(sample):
    sys.exit(3)


def stops(sample):
    raise StopIteration


def times_out_itself(sample):
    raise TimeoutError("my own")


@pytest.mark.parametrize("fn", [raises, raises_async, exits, stops, times_out_itself])
def test_exceptions_of_any_kind_are_failures(caller, fn):
    outcomes = score(caller, fn)
    assert values(outcomes) == ["bug" if fn in (raises, raises_async) else "raised"] * 6
    assert outcomes[0].error.__traceback__ is not None


@pytest.mark.parametrize("extra", [float("nan"), -float("inf"), None, "text", [1.0], 10**400])
def test_what_is_logged_besides_costs_no_reward(caller, extra):
    (outcome,) = score(caller, lambda s: {"reward": 0.5, "part": extra}, SAMPLES[:1])
    assert outcome["reward"] == 0.5 and not math.isfinite(outcome["part"])


@pytest.mark.parametrize(
    "bug",
    [
        lambda s: None,
        lambda s: "0.5",
        lambda s: s.anwser,
        lambda s: s.meta["anwser"],
        lambda s: [][0],
        lambda s: anwser,  # noqa: F821
        lambda s: 1 + None,
        lambda s: 1 / 0,
        lambda s: importlib.import_module("no_such_module"),
        lambda group: [1.0] * 99,
    ],
)
def test_bugs_are_not_called_again(caller, bug):
    calls = []

    def wrong(sample):
        calls.append(sample)
        return bug(sample)

    (outcome,) = score(caller, wrong, SAMPLES[:1], retries=3)
    assert outcome.reason in BUGS and len(calls) == 1


def test_a_failure_names_the_line_of_ones_own_code(caller):
    (outcome,) = score(caller, raises, SAMPLES[:1])
    line = raises.__code__.co_firstlineno + 1
    assert str(outcome) == f"bug: KeyError: 'nothing here' (tests/rewards/test_calls.py:{line})"


def test_a_hanging_function_costs_its_timeout_and_no_more(caller):
    release = threading.Event()

    def hangs(sample):
        release.wait(30 if sample.response == "01" else 0)
        return 1.0

    start = time.monotonic()
    assert values(score(caller, hangs, timeout=0.3)) == [1.0, "timeout", 1.0, 1.0, 1.0, 1.0]
    assert time.monotonic() - start < 5
    release.set()
    assert values(score(caller, lambda s: 1.0)) == [1.0] * 6


def test_a_hanging_async_function_is_cancelled_even_if_it_resists(caller):
    async def resists(sample):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(30)

    start = time.monotonic()
    assert values(score(caller, resists, timeout=0.2)) == ["timeout"] * 6
    assert time.monotonic() - start < 5


def test_an_async_function_that_blocks_is_found_out():
    release = threading.Event()

    async def blocks(sample):
        release.wait(60)
        return 1.0

    caller = RewardCaller()
    try:
        with pytest.raises(RewardError, match=r"\('f'\) has blocked its event loop for 0.2 s.*await"):
            score(caller, blocks, timeout=0.2)
    finally:
        release.set()
        caller.close()


def test_a_thread_may_come_back_after_the_caller_is_gone(caplog):
    release = threading.Event()
    caller = RewardCaller()
    assert values(score(caller, lambda s: release.wait(60), SAMPLES[:1], timeout=0.05)) == ["timeout"]
    (thread,) = caller._threads._hung
    caller.close()
    time.sleep(0.05)
    release.set()
    thread.join(10)
    assert not thread.is_alive() and "closed" not in caplog.text


def test_too_many_hung_threads_end_the_run(caller):
    release = threading.Event()
    try:
        with pytest.raises(RewardError, match=r"(?s)'f' \(timeout 0.05 s\).*async def.*subprocess"):
            score(caller, lambda s: release.wait(60), SAMPLES * (MAX_HUNG + 1), timeout=0.05)
    finally:
        release.set()
    assert values(score(caller, per_sample))[0] == 0.0


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_calls_are_repeated_as_often_as_configured(caller, retries):
    seen = []

    def third_time_lucky(sample):
        seen.append(sample.response)
        return 0.5 if len(seen) == 3 else float("nan")

    outcome = values(score(caller, third_time_lucky, SAMPLES[:1], retries=retries))
    assert outcome == ([0.5] if retries == 2 else ["not_finite"])
    assert len(seen) == retries + 1


def test_calls_and_functions_overlap(caller):
    """Each call waits for another one of its function, and for one of the other function."""
    two_threads, plain, coroutines = threading.Barrier(2), threading.Event(), threading.Semaphore(0)
    begun = []

    def meets(sample):
        plain.set()
        assert coroutines.acquire(timeout=30)
        two_threads.wait(30)
        return 1.0

    async def meets_async(sample):
        begun.append(sample)
        coroutines.release()
        while len(begun) < 2 or not plain.is_set():
            await asyncio.sleep(0.001)
        return 2.0

    one, two = caller.score([RewardFunction("a", meets), RewardFunction("b", meets_async)], SAMPLES)
    assert (values(one), values(two)) == ([1.0] * 6, [2.0] * 6)


def test_an_async_function_keeps_its_loop_between_calls(caller):
    loops = set()

    async def fn(sample):
        loops.add(asyncio.get_running_loop())
        return 0.0

    score(caller, fn)
    score(caller, fn)
    assert len(loops) == 1


def test_works_inside_a_running_loop(caller):
    async def main():
        return score(caller, per_sample_async)

    assert values(asyncio.run(main()))[1] == 1.0


def test_a_function_without_a_parameter_is_refused():
    with pytest.raises(ValueError, match="'f' takes no positional argument"):
        RewardFunction("f", lambda *, k=1: 0.0)


@pytest.mark.parametrize(
    "function, whose",
    [
        (lambda completions, **columns: [0.0], "completions, as in TRL"),
        (lambda prompts, completions, **columns: [0.0], "prompts, completions, as in TRL"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, "ground_truth, as in verl"),
        (lambda queries, prompts, labels: 0.0, "labels, as in OpenRLHF"),
        (lambda sample, answer: 0.0, r"sample, answer\. Coalign calls it with one argument"),
    ],
)
def test_the_signature_of_another_library_is_refused(function, whose):
    with pytest.raises(ValueError, match=f"'theirs' takes .*{whose}"):
        RewardFunction("theirs", function)


def test_an_argument_with_a_default_is_no_second_sample():
    assert RewardFunction("f", lambda group, scale=2: [0.0]).takes == "group"


class Counter:
    """A client, a cache: something to keep between calls."""

    def __init__(self, *, start=0):
        self.calls = start

    def __call__(self, samples):
        self.calls += 1
        return [self.calls] * len(samples)


def test_of_a_class_one_object_is_made_with_the_arguments(caller):
    function = RewardFunction("counter", Counter, {"start": 5})
    assert function.takes == "samples" and function.arguments == {}
    assert [caller.score([function], SAMPLES[:1])[0][0]["reward"] for _ in range(3)] == [6.0, 7.0, 8.0]
    with pytest.raises(TypeError, match="begin"):
        RewardFunction("counter", Counter, {"begin": 5})


def test_a_function_that_gives_up_is_not_called_again(caller):
    seen = []

    def refused(sample):
        seen.append(sample.response)
        raise GiveUp("no such model") if sample.response == "00" else ValueError("once more")

    assert values(score(caller, refused, SAMPLES[:2], retries=2)) == ["raised"] * 2
    assert sorted(seen) == ["00", "01", "01", "01"]


def test_a_service_is_left_alone_as_long_as_it_asks_for(caller):
    times = []

    def later(sample):
        times.append(time.monotonic())
        if len(times) == 1:
            raise ServiceError("busy", 0.4)
        return 1.0

    assert values(score(caller, later, SAMPLES[:1])) == [1.0]
    assert times[1] - times[0] >= 0.4


def test_a_service_is_waited_for_as_long_as_patience_lasts(caller):
    times = []

    def down(sample):
        times.append(time.monotonic())
        raise ServiceError("down")

    assert values(score(caller, down, SAMPLES[:1], patience=1.0, retries=0)) == ["service"]
    assert 0.9 < times[-1] - times[0] < 5 and len(times) > 3
    assert caller.service_failures["f"] == len(times)
    times.clear()
    assert values(score(caller, down, SAMPLES[:1], patience=600.0, weight=0.0, retries=1)) == ["service"]
    assert len(times) == 2  # what is only logged holds up nothing


def test_patience_begins_anew_when_the_service_answers_and_is_for_its_failures_alone(caller):
    calls = []

    def flaky(sample):
        calls.append(sample.response)
        if sample.response == "00":
            raise ValueError("its own error")
        if len(calls) < 8:
            raise ServiceError("down", 0.1)
        return 1.0

    assert values(score(caller, flaky, SAMPLES[:3], patience=10.0, retries=1)) == ["raised", 1.0, 1.0]
    assert calls.count("00") == 2


def test_a_timeout_of_a_service_is_its_failure(caller):
    class Slow:
        is_service = True
        calls = 0

        async def __call__(self, sample):
            self.calls += 1
            await asyncio.sleep(30 if self.calls < 4 else 0)
            return 1.0

    assert values(score(caller, Slow(), SAMPLES[:1], timeout=0.1, patience=30.0)) == [1.0]
    assert caller.service_failures == {"f": 3}


def test_pauses_grow_vary_and_end(caller):
    failure = [RewardFailure("raised", ValueError())]
    for attempt, least in ((0, 0.1), (1, 0.2), (4, 1.6)):
        pauses = [caller._pause(attempt, failure) for _ in range(50)]
        assert all(least <= pause <= 1.5 * least for pause in pauses) and len(set(pauses)) > 1
    assert caller._pause(30, failure) == caller._pause(0, [RewardFailure("raised", ServiceError("", 3600.0))]) == 60.0


def test_an_async_function_may_bound_its_calls(caller):
    class Narrow:
        at_once = 1
        running = most = 0

        async def __call__(self, sample):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.05)
            self.running -= 1
            return 1.0

    narrow = Narrow()
    # What waits for its turn does not spend its timeout: 30 calls of 0.05 s, one after the other, each within 1 s.
    assert values(score(caller, narrow, SAMPLES * 5, timeout=1.0)) == [1.0] * 30 and narrow.most == 1


def test_what_has_no_short_form_is_a_failure():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, [10**5000], {"reward": nested}):
        (outcome,) = _read_outcomes(RewardFunction("odd", abs), value, 1)
        assert outcome.reason == "wrong_type" and len(str(outcome)) < 300
