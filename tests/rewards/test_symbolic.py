"""Expressions are compared by math-verify in a process that can be killed."""

import importlib.util
import time
from importlib import import_module

import pytest

from coalign.rewards import math
from coalign.rewards.symbolic import Checker
from tests.rewards.samples import sample

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra [math]")


@needs_math_verify
@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt 2}", 1.0),
        (r"x^2 + 2x + 1", r"(x+1)^2", 1.0),
        (r"(1, 2)", r"\left( 1,2 \right)", 1.0),
        (r"\frac{\pi}{2}", r"\frac{\pi}{3}", 0.0),
        (r"2\sqrt{3}", "", 0.0),
    ],
)
def test_expressions(gold, predicted, expected):
    assert math(sample(rf"so \boxed{{{predicted}}}", answer=rf"\boxed{{{gold}}}")) == expected


@needs_math_verify
def test_an_endless_computation_is_killed_and_the_next_one_served():
    checker = Checker()
    assert checker.ask("x+1", "1+x")
    first, start = checker._process.pid, time.monotonic()
    assert not checker.ask("x+1", "(x+1)^{100000}", seconds=0.5)
    assert 0.5 < time.monotonic() - start < 10
    assert checker.ask("x+1", "1+x") and checker._process.pid != first
    checker._process.kill()
    checker._process.wait()


def test_without_math_verify_only_expressions_are_refused(monkeypatch):
    symbolic = import_module("coalign.rewards.symbolic")
    symbolic._checkers.cache_clear()
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    assert math(sample(r"\boxed{3}", answer="3")) == 1.0
    assert math(sample(r"\boxed{x+1}", answer="x+1")) == 1.0
    with pytest.raises(ModuleNotFoundError, match=r"coalign\[math\]"):
        math(sample(r"\boxed{1+x}", answer="x+1"))
