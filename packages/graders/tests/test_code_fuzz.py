"""Random programs, tests, answers and sizes for the verdicts of code: a verdict or a documented error, in time."""

import ast
import asyncio
import json
import sys
import time
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coalign_graders.code import CodeTest, code, extract_code, read_tests
from coalign_graders.sandbox.sandbox import Sandbox, SandboxLimits, SandboxResult
from tests.rewards.samples import sample

SECONDS = 10.0  # of processor time, for what takes milliseconds: no test of speed, but of what never ends
FAST, SLOW = 500, 10_000

# Pieces of Python that meet in odd places, and literals that are no such.
PIECES = (
    *("assert ", "f(1)", "f(x)", " == ", " != ", " is ", " in ", " < ", " and ", " or ", "not ", "abs(", "set(", "["),
    *("]", "{", "}", "(", ")", ":", ",", "-", "~", "0x", "1e999", "9" * 5000, "'", '"""', "\\", "\n", "    ", "\t"),
    *("\0", "#", "def check(candidate):\n", "return", "lambda", "yield", "await ", "*", "**", "==", "math.isclose("),
    *("float('inf')", "b'x'", "...", "None", "True", "1j", "\ud800", "é", "```python\n", "```", "</think>", "class C:"),
    *(";", "@", "%", ":=", "{[]: 1}", "{{}}", "__answer__(", "import os", "if 1:", "sorted(", "raise", "0.1"),
    *("candidate", "10**400"),
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.tuples(st.sampled_from(PIECES), st.integers(1, 3000)).map(
        lambda one: one[0] * min(one[1], 10**5 // len(one[0]))
    ),
)
VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=9)),
        *(st.binary(max_size=9), st.sampled_from([10**400, -(10**400), 2**63, 1e308])),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)),
        *(st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=4),),
        st.frozensets(st.one_of(st.integers(), st.text(max_size=4)), max_size=4),
    ),
    max_leaves=6,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=6,
)
CALLS = st.builds(
    lambda name, cases: {"fn_name": name, "inputs": [one[0] for one in cases], "outputs": [one[1] for one in cases]},
    st.one_of(st.just("f"), TEXTS),
    st.lists(st.tuples(st.one_of(JSON, st.lists(JSON, max_size=2)), JSON), max_size=3),
)
CASES = st.lists(st.fixed_dictionaries({"input": JSON, "output": JSON}), max_size=3)
COMPARISONS = st.builds(
    lambda left, sign, value: f"assert {left} {sign} {value!r}",
    st.sampled_from(["f(1)", "set(f(1))", "abs(f(1) - 0.5)", "f(1)[0]", "0 < f(1)", "len(f(2))"]),
    st.sampled_from(["==", "!=", "<", ">=", "is", "is not", "in", "not in", "== 1 <"]),
    VALUES,
)
PROGRAMS = st.lists(st.one_of(COMPARISONS, TEXTS), max_size=4).map("\n".join)
CHECKS = st.lists(COMPARISONS, min_size=1, max_size=4).map(
    lambda lines: "def check(candidate):\n" + "".join(f"    {line.replace('f(', 'candidate(')}\n" for line in lines)
)
TESTS = st.one_of(
    *(PROGRAMS, CHECKS, st.lists(st.one_of(COMPARISONS, TEXTS), max_size=3), CALLS, CASES, JSON),
    *(each.map(json.dumps) for each in (CALLS, CASES, JSON)),
)
ANSWERS = st.one_of(TEXTS, VALUES.map(repr), st.lists(VALUES, max_size=3).map(repr))
REPORTS = st.tuples(
    st.sampled_from(["exit 0", "exit 1", "signal 9", "seconds", "files"]), TEXTS, ANSWERS, st.sampled_from(range(3))
)


def judge(source, entry, reports):
    """Read the tests and judge reports about each: with its secret number in front, without it, and as a list."""
    try:
        tests = read_tests(source, entry)
    except ValueError:
        return
    assert tests and all(isinstance(test, CodeTest) for test in tests)
    for test in tests[:5]:
        json.dumps(test.request)
        for ended, output, answer, form in reports:
            token = test.request.get("token", "")
            text = (token + answer, answer, f"{token}[{answer}]")[form]
            verdict = test.passes(SandboxResult(ended, output, text))
            assert verdict is True or verdict is False
            assert not (verdict and token and not text.startswith(token))


def judge_in_time(response, source, entry, reports):
    begun = time.thread_time()
    assert isinstance(extract_code(response), str)
    judge(source, entry, reports)
    assert time.thread_time() - begun < SECONDS


MANY = [pytest.mark.slow, pytest.mark.timeout(1800)]
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW, marks=MANY)])
def test_a_verdict_or_a_documented_error(cases):
    entries, reports = st.one_of(st.none(), st.just("f"), TEXTS), st.lists(REPORTS, min_size=1, max_size=2)
    run = given(TEXTS, TESTS, entries, reports)(judge_in_time)
    repeated = {"derandomize": cases == FAST, "suppress_health_check": QUIET}
    settings(max_examples=cases, deadline=None, database=None, **repeated)(run)()


@settings(max_examples=FAST // 5, deadline=None, database=None, derandomize=True)
@given(VALUES)
def test_a_right_value_passes(value):
    """Whatever a function may return, as a literal: the comparison outside agrees with Python's own."""
    with suppress(ValueError, SyntaxError):  # inf and nan have no literal
        same = ast.literal_eval(repr(value))
        (test,) = read_tests([f"assert f(1) == {value!r}"])
        if not test.forgeable:
            report = SandboxResult("exit 0", "", f"{test.request['token']}[{value!r}]")
            assert test.passes(report) == (same == value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
@pytest.mark.slow
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, TESTS, st.sampled_from([1, 8, 64]), st.sampled_from([64, 256]), st.sampled_from([1, 16]))
def test_random_programs_in_jail(program, source, output_kb, memory_mb, file_mb):
    sizes = {"output_kb": output_kb, "memory_mb": memory_mb, "file_mb": file_mb}
    row = sample(f"```python\n{program}\n```", tests=source, entry_point="f")
    begun = time.monotonic()
    try:
        scored = asyncio.run(code(row, seconds=1.0, total_seconds=3.0, **sizes))
        assert 0.0 <= scored["reward"] <= 1.0 and set(scored) == {"reward", "solved", "timed_out", "forgeable"}
    except (ValueError, KeyError):
        pass
    assert time.monotonic() - begun < 3.0 + 1.0 + 30.0  # what is to end by itself, and the patience of a busy machine


HOSTILE = """
class Odd:
    def __repr__(self): return {text!r} * {times}
    __hash__ = lambda self: {number}
    __eq__ = lambda *_: True
    def __getattr__(self, name): {act}
def f(*_): return {shape}
f.__class__
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
@pytest.mark.parametrize("act", ["return self", "raise SystemExit", "raise RecursionError", "while True: pass"])
def test_hostile_objects_in_jail(act):
    async def verdicts():
        tests = [*read_tests("def check(c):\n    assert c(1) == 1\n", "f"), *read_tests(["assert abs(f(1) - 1) < 5"])]
        calls = read_tests({"fn_name": "f", "inputs": [[1]], "outputs": [1.5]})
        async with Sandbox(SandboxLimits(seconds=1.0, output_kb=8)) as box:
            for text, times, shape in (
                ("{[]: 1}", 1, "Odd()"),
                ("[", 4000, "[Odd()]"),
                ("1,", 10**6, "{Odd(): Odd()}"),
            ):
                source = HOSTILE.format(text=text, times=times, number=2**61, act=act, shape=shape)
                for test in tests + calls:
                    yield test.passes(await box.run(source, **test.request))

    async def collect():
        return [one async for one in verdicts()]

    assert not any(asyncio.run(collect()))
