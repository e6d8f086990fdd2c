"""Checks run in processes that can be killed, and what is missing there is said."""

import asyncio
import importlib.util
import time
from importlib import import_module

import pytest

from coalign.rewards.calls import RewardCaller, RewardFunction
from coalign.rewards.thread_pool import MAX_HUNG
from coalign_graders import answers, math_answer
from coalign_graders.checker import AT_ONCE, Checker, check, read_literal
from packages.graders.tests.test_math_answer import math
from tests.rewards.samples import sample

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra [math]")


@needs_math_verify
def test_an_endless_computation_is_killed_and_the_next_one_served():
    checker = Checker("math")
    assert checker.ask("math", "x+1", "1+x")
    first, start = checker._process.pid, time.monotonic()
    assert not checker.ask("math", "x+1", "(x+1)^{9^{9^{9^9}}}", seconds=0.5)
    assert time.monotonic() - start < 10
    assert checker.ask("math", "x+1", "1+x") and checker._process.pid != first
    checker._process.kill()
    checker._process.wait()
    assert not checker.ask("math", "x+1", "1+x")  # the process has died: no verdict but this one is lost
    assert checker.ask("math", "x+1", "1+x")


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("literal", ("[1, (2, 'a')]",), True),
        ("literal", ("[" * 100_000,), False),
        ("literal", ("-" * 100_000 + "1",), False),
        ("literal", ("9" * 100_000,), False),
        ("literal", ("open('x')",), False),
        ("literal", ("",), False),
        ("pattern", ("a.*b", "a\nb"), True),
        ("pattern", ("a.*b", "ab "), False),
    ],
)
def test_checks(name, arguments, expected):
    assert check(name, *arguments) is expected


def test_a_literal_that_takes_long_is_no_literal():
    """A set of numbers of one hash: each is compared with all before it."""
    assert read_literal("[1, (2, {'a'})]") == [1, (2, {"a"})]
    slow = "{" + ",".join(str(i * (2**61 - 1)) for i in range(1, 40_000)) + "}"
    start = time.monotonic()
    with pytest.raises(ValueError, match="takes too long"):
        read_literal(slow)
    assert time.monotonic() - start < 10


def test_a_pattern_without_an_end_is_killed():
    checker = Checker("text")
    start = time.monotonic()
    assert not checker.ask("pattern", "(a|aa)+$", "a" * 60 + "b", seconds=0.5)
    assert time.monotonic() - start < 10
    assert checker.ask("pattern", "a", "a")


def test_without_math_verify_only_expressions_are_refused(monkeypatch):
    checker = import_module("coalign_graders.checker")
    monkeypatch.setattr(checker.importlib.util, "find_spec", lambda name: None)
    checker._start_pool.cache_clear()
    try:
        assert math(sample(r"\boxed{3}", answer="3")) == 1.0
        assert math(sample(r"\boxed{x+1}", answer="x+1")) == 1.0
        with pytest.raises(ModuleNotFoundError, match=r"coalign\[math\]"):
            math(sample(r"\boxed{1+x}", answer="x+1"))
    finally:
        checker._start_pool.cache_clear()


def test_hard_texts_get_verdicts_and_do_not_end_the_run(monkeypatch):
    """Waiting for a process is no part of a call's time: of any number of hard texts each gets a verdict."""
    assert math_answer.math.at_once == answers.regex.at_once == AT_ONCE  # a call begins when a process is free
    monkeypatch.setattr("coalign_graders.checker.SECONDS", 0.05)
    hard = [sample("a" * 60 + "b", index=i) for i in range(MAX_HUNG + 4)]
    function = RewardFunction("regex", answers.regex, {"pattern": "(a|aa)+"}, retries=0)
    caller = RewardCaller()
    (outcomes,) = caller.score([function], hard)
    caller.close()
    assert outcomes == [{"reward": 0.0}] * len(hard)


def test_the_loop_goes_on_while_an_answer_is_read():
    """A literal of a function's result that takes long keeps no other call waiting."""

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await asyncio.to_thread(check, "literal", "[" + "1," * 400_000 + "]")
        ticking.cancel()
        return ticks

    assert asyncio.run(run()) > 3
