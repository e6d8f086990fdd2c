"""The code reward: runs the code of a response in a sandbox (coalign.rewards.sandbox) and counts the tests it passes.

A test that compares a result with a known value is judged outside of the sandbox: the code computes the result and
never sees the value, so printing, exiting or overloading `==` cannot pass it. Other tests (arbitrary statements) run in
the code's own process and return a secret number at their end. Printing or exiting early does not pass those, but code
that overloads `==`, or searches the interpreter's frames for the number, does.
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

from coalign.rewards.checker import read_literal
from coalign.rewards.sandbox.sandbox import REQUIREMENTS, Sandbox, SandboxLimits, SandboxResult, require_limits
from coalign.types import Sample

# Possessive, so that a long line of blanks that is no fence is looked at once.
_BLOCK = re.compile(r"^[ \t]*+```[ \t]*+([^\s`]*+)[^\n`]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)
_CLOSE = 1e-6  # relative or absolute difference of floating-point numbers that count as equal


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
    the whole response. ``row[tests_key]`` is one of these, or JSON text of it:

    - a list of `assert` statements;
    - a test program as one text; if it defines `check`, as HumanEval does, `check(row[entry_key])` is called at its
      end;
    - cases of standard input and output, `[{input: …, output: …}]` or `{inputs: […], outputs: […]}`, compared without
      regard to whitespace; with `fn_name` in the latter, arguments and results of that function or `Solution` method.

    Each test is a process of its own with ``seconds`` of wall-clock time. Tests not begun within ``total_seconds`` have
    failed (keep it below the reward's `timeout`). SandboxLimits describes the other limits. ``packages`` allows imports
    of installed packages. ``require`` lists what this machine must be able to limit; to ask for less is a risk.

    Also logs `solved` (1.0 if all passed) and `timed_out` (1.0 if a test ran out of time). Raises KeyError or
    ValueError for a row without usable tests, LimitNotEnforceable if this machine cannot keep what is required, and
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
            report = await sandbox.run(source, **test.request)
            passed += await asyncio.to_thread(test.passes, report)  # a second, if the code made its answer for that
            timed_out |= report.ended == "seconds"
            if not partial and not passed:
                break
    solved = float(passed == len(tests))
    return {"reward": passed / len(tests) if partial else solved, "solved": solved, "timed_out": float(timed_out)}


code.at_once = os.cpu_count() or 1  # more would slow each other down


def extract_code(response: str) -> str:
    """The program in a response; a block that never closes goes to the end."""
    text = response.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    marked = [body for language, body in blocks if language.lower().startswith("py")]
    return (marked or [body for _, body in blocks] or [text])[-1]


@dataclass(frozen=True)
class CodeTest:
    """What to run, and whether its result means that the test passed."""

    request: Mapping[str, str]  # arguments of Sandbox.run
    passes: Callable[[SandboxResult], bool]


def read_tests(source: Any, entry: str | None = None) -> list[CodeTest]:
    """Parse tests in any of the forms that ``code`` takes. ValueError for other forms and for no tests."""
    if isinstance(source, str):
        if not source.lstrip().startswith(("[", "{")):
            has_check = entry and re.search(r"^def check\(", source, re.MULTILINE)
            return [_script_test(f"{source}\ncheck({entry})\n" if has_check else source)]
        source = json.loads(source)
    if isinstance(source, Mapping) and {"inputs", "outputs"} <= set(source):
        cases = list(zip(source["inputs"], source["outputs"], strict=True))
        name = source.get("fn_name")
        tests = [_call_test(name, *case) if name else _output_test(*case) for case in cases]
    elif _all_are(source, str):
        tests = [_assert_test(text) for text in source]
    elif _all_are(source, Mapping) and all({"input", "output"} <= set(case) for case in source):
        tests = [_output_test(case["input"], case["output"]) for case in source]
    else:
        raise ValueError(
            f"tests are {source!r:.80}; expected a list of assert statements, a test program, cases with `input` and "
            "`output`, or `inputs`, `outputs` and perhaps `fn_name`"
        )
    if not tests:
        raise ValueError("the row's tests are empty, so there is nothing to reward")
    return tests


def _tests(sample: Sample, key: str) -> Any:
    if sample.meta.get(key) is None:
        raise KeyError(f"the row has no tests in '{key}'; it has {sorted(sample.meta)} (set tests_key)")
    return sample.meta[key]


def _all_are(values: Any, kind: type) -> bool:
    return isinstance(values, Sequence) and all(isinstance(one, kind) for one in values)


def _assert_test(text: str) -> CodeTest:
    """`assert f(1) == 2` evaluates f(1) in the sandbox and compares outside; any other statement runs as it is."""
    try:
        match ast.parse(text).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                expected = ast.literal_eval(right)
            case _:
                return _script_test(text)
    except (SyntaxError, ValueError):
        return _script_test(text)
    return CodeTest({"evaluate": ast.unparse(left)}, lambda report: _read_value(report) == (True, expected))


def _script_test(text: str) -> CodeTest:
    token = secrets.token_hex(16)
    return CodeTest({"test": text, "token": token}, lambda report: report.answer == token)


def _output_test(stdin: Any, expected: Any) -> CodeTest:
    lines, wanted = (one if isinstance(one, str) else "\n".join(map(str, one)) for one in (stdin, expected))
    return CodeTest(
        {"stdin": lines}, lambda report: report.ended == "exit 0" and report.output.split() == wanted.split()
    )


def _call_test(name: str, arguments: Sequence[Any], expected: Any) -> CodeTest:
    if not name.isidentifier():
        raise ValueError(f"fn_name is {name!r}; expected the name of a function")
    function = f"(globals().get({name!r}) or Solution().{name})"
    expression = f"{function}(*{list(arguments)!r})"
    unwrapped = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected  # APPS wraps results

    def passes(report: SandboxResult) -> bool:
        known, value = _read_value(report)
        return known and (_is_same(value, expected) or _is_same(value, unwrapped))

    return CodeTest({"evaluate": expression}, passes)


def _read_value(report: SandboxResult) -> tuple[bool, Any]:
    """(whether the code returned a literal, its value)."""
    try:
        return bool(report.answer), read_literal(report.answer or "None")
    except ValueError:
        return False, None


def _is_same(value: Any, expected: Any) -> bool:
    """Equality as in JSON: a tuple equals a list, keys are strings, floating-point numbers may differ by 1e-6."""
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = ({str(key): one for key, one in d.items()} for d in (value, expected))
        return value.keys() == expected.keys() and all(_is_same(one, expected[key]) for key, one in value.items())
    if isinstance(value, float) or isinstance(expected, float):
        if not (isinstance(value, (int, float)) and isinstance(expected, (int, float))):
            return False
        return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return value == expected
