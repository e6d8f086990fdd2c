"""Does the code in a response pass the tests of its row? It runs in a sandbox (see coalign.rewards.sandbox.sandbox).

Tests that compare a result with a known value are judged out here: the code computes the result and is never told the
value, so no printing, exiting or overloaded `==` can make it pass. Other tests (statements of any kind) run beside the
code, in its process, and hand over a secret number at their end: printing or exiting early does not pass them, code
that overloads `==` or searches the interpreter's frames for the number does.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coalign.rewards.sandbox.sandbox import REQUIREMENTS, Sandbox, SandboxLimits, SandboxResult, require_limits
from coalign.types import Sample

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_CLOSE = 1e-6  # relative difference of floating-point numbers that are the same


async def code(
    sample: Sample,
    *,
    tests_key: str = "tests",
    entry_key: str = "entry_point",
    partial: bool = True,
    seconds: float = 5.0,
    total_seconds: float = 20.0,
    memory_mb: int = 512,
    processes: int = 1,
    output_kb: int = 256,
    file_mb: int = 16,
    packages: bool = True,
    require: Sequence[str] = REQUIREMENTS,
) -> dict[str, float]:
    """The share of the row's tests that the code passes; with ``partial: false`` 1.0 for all of them, else 0.0.

    The code is the last block of the response (after ``</think>``) that is marked as Python, else the last block, else
    all of it. ``row[tests_key]`` is one of: a list of `assert` statements; a test program as one text (with
    `check(row[entry_key])` called at its end if it defines `check`, as HumanEval does); cases
    `[{input: …, output: …}]` or `{inputs: […], outputs: […]}` of standard input and output, whitespace aside; and with
    `fn_name` in the latter, argument lists and results of that function (or method of `Solution`). JSON text, too.

    Each test is a process of its own with ``seconds`` of wall-clock time; tests not begun within ``total_seconds`` have
    failed (keep it below the reward's `timeout`). The other limits: coalign.rewards.sandbox.sandbox.Limits. ``packages``:
    installed packages can be imported. ``require``: what this machine must be able to limit; less of it is a risk that
    you take knowingly.

    Also reports `solved` (1.0 if all passed) and `timed_out` (1.0 if a test ran out of time). Raises KeyError or
    ValueError for a row without usable tests, Unenforceable if this machine cannot keep what is required,
    SandboxError if the sandbox itself fails.
    """
    tests = read_tests(_tests(sample, tests_key), sample.meta.get(entry_key))
    limits = SandboxLimits(seconds, memory_mb, processes, output_kb, file_mb)
    await asyncio.to_thread(require_limits, tuple(require), processes)
    source, passed, timed_out = extract_code(sample.response), 0, False
    begun = time.monotonic()
    async with Sandbox(limits, packages=packages) as sandbox:
        for test in tests:
            if time.monotonic() - begun > total_seconds:
                timed_out = True
                break
            report = await sandbox.run(source, **test.asked)
            passed += test.passes(report)
            timed_out |= report.ended == "seconds"
            if not partial and not passed:
                break
    solved = float(passed == len(tests))
    return {"reward": passed / len(tests) if partial else solved, "solved": solved, "timed_out": float(timed_out)}


code.at_once = os.cpu_count() or 1  # more would take time from each other


def extract_code(response: str) -> str:
    """The program in a response; an unclosed block counts up to the end."""
    text = response.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    marked = [body for language, body in blocks if language.lower().startswith("py")]
    return (marked or [body for _, body in blocks] or [text])[-1]


@dataclass(frozen=True)
class CodeTest:
    """What to ask of the code, and whether a report says that it passed."""

    asked: Mapping[str, str]  # arguments of Sandbox.run
    passes: Callable[[SandboxResult], bool]


def read_tests(given: Any, entry: str | None = None) -> list[CodeTest]:
    """The tests in one of the forms that ``code`` takes. ValueError if it is none of them, or empty."""
    if isinstance(given, str):
        if not given.lstrip().startswith(("[", "{")):
            return [_program(given, entry)]
        given = json.loads(given)
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= set(given):
        cases = list(zip(given["inputs"], given["outputs"], strict=True))
        name = given.get("fn_name")
        tests = [_call(name, *case) if name else _dialogue(*case) for case in cases]
    elif _all_are(given, str):
        tests = [_statement(text) for text in given]
    elif _all_are(given, Mapping) and all({"input", "output"} <= set(case) for case in given):
        tests = [_dialogue(case["input"], case["output"]) for case in given]
    else:
        raise ValueError(
            f"tests are {given!r:.80}; expected a list of assert statements, a test program, cases with `input` and "
            "`output`, or `inputs`, `outputs` and perhaps `fn_name`"
        )
    if not tests:
        raise ValueError("the row's tests are empty, so there is nothing to reward")
    return tests


def _tests(sample: Sample, key: str) -> Any:
    if sample.meta.get(key) is None:
        raise KeyError(f"the row has no tests in '{key}'; it has {sorted(sample.meta)} (set tests_key)")
    return sample.meta[key]


def _all_are(given: Any, kind: type) -> bool:
    return isinstance(given, Sequence) and all(isinstance(one, kind) for one in given)


def _program(text: str, entry: str | None) -> CodeTest:
    if entry and re.search(r"^def check\(", text, re.MULTILINE):
        text = f"{text}\ncheck({entry})\n"
    return _unforeseen(text)


def _statement(text: str) -> CodeTest:
    """`assert f(1) == 2` is asked for f(1); anything else runs as it stands."""
    try:
        (statement,) = ast.parse(text).body
        test = statement.test
        (right,) = test.comparators
        if not isinstance(test.ops[0], ast.Eq):
            return _unforeseen(text)
        expected = ast.literal_eval(right)
    except (SyntaxError, ValueError, AttributeError):
        return _unforeseen(text)
    return CodeTest({"evaluate": ast.unparse(test.left)}, lambda report: _value(report) == (True, expected))


def _unforeseen(text: str) -> CodeTest:
    token = secrets.token_hex(16)
    return CodeTest({"test": text, "token": token}, lambda report: report.answer == token)


def _dialogue(given: Any, expected: Any) -> CodeTest:
    lines, wanted = (one if isinstance(one, str) else "\n".join(map(str, one)) for one in (given, expected))
    return CodeTest(
        {"stdin": lines}, lambda report: report.ended == "exit 0" and report.output.split() == wanted.split()
    )


def _call(name: str, arguments: Sequence[Any], expected: Any) -> CodeTest:
    if not name.isidentifier():
        raise ValueError(f"fn_name is {name!r}; expected the name of a function")
    function = f"(globals().get({name!r}) or Solution().{name})"
    expression = f"{function}(*{list(arguments)!r})"
    alone = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected  # APPS wraps results

    def passes(report: SandboxResult) -> bool:
        known, value = _value(report)
        return known and (_same(value, expected) or _same(value, alone))

    return CodeTest({"evaluate": expression}, passes)


def _value(report: SandboxResult) -> tuple[bool, Any]:
    """Whether the code gave a value that can be read, and the value."""
    try:
        return bool(report.answer), ast.literal_eval(report.answer or "None")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _same(value: Any, expected: Any) -> bool:
    """Equal as JSON has it: a tuple is a list, keys are texts, floating-point numbers are close."""
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = ({str(key): one for key, one in d.items()} for d in (value, expected))
        return value.keys() == expected.keys() and all(_same(one, expected[key]) for key, one in value.items())
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, (int, float)) and isinstance(expected, (int, float))
        return numbers and math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return value == expected
