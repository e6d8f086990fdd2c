"""The code reward: runs the code of a response in a sandbox (coalign.rewards.sandbox) and counts the tests it passes.

How a test is judged, and which ones code can forge, is in coalign.rewards.code_tests.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from coalign.rewards.code_tests import read_tests
from coalign.rewards.sandbox.sandbox import REQUIREMENTS, Sandbox, SandboxLimits, require_limits
from coalign.types import Sample

# Possessive, so that a long line of blanks that is no fence is looked at once.
_BLOCK = re.compile(r"^[ \t]*+```[ \t]*+([^\s`]*+)[^\n`]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)


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
    failed (keep both together below the reward's `timeout`). SandboxLimits describes the other limits. ``packages``
    allows imports of installed packages. ``require`` lists what this machine must be able to limit; to ask for less is
    a risk.

    Also logs `solved` (1.0 if all passed), `timed_out` (1.0 if a test ran out of time) and `forgeable`, the share of
    the row's tests that are judged beside the code. Raises KeyError or ValueError for a row without usable tests,
    LimitNotEnforceable if this machine cannot keep what is required, and SandboxError if the sandbox itself fails.
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
    return {
        "reward": passed / len(tests) if partial else solved,
        "solved": solved,
        "timed_out": float(timed_out),
        "forgeable": sum(test.forgeable for test in tests) / len(tests),
    }


code.at_once = os.cpu_count() or 1  # more would slow each other down


def extract_code(response: str) -> str:
    """The program in a response; a block that never closes goes to the end."""
    text = response.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    marked = [body for language, body in blocks if language.lower().startswith("py")]
    return (marked or [body for _, body in blocks] or [text])[-1]


def _tests(sample: Sample, key: str) -> Any:
    if sample.meta.get(key) is None:
        raise KeyError(f"the row has no tests in '{key}'; it has {sorted(sample.meta)} (set tests_key)")
    return sample.meta[key]
