"""Checks of what a model wrote, in processes that can be killed: mathematics, literals, patterns.

A response can hold anything, such as `9^{9^{9^9}}` or a literal of a million brackets. Reading it then takes hours
inside one C call, which holds the interpreter's lock and which no signal or deadline can interrupt. So a process of its
own reads it (`checks.py`), with limits of time and memory. A check that meets one is False: a verdict, not an error.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from coalign_graders.processors import count_processors

SECONDS = 5.0  # processor time that one check may take; usual ones take milliseconds
_WAIT = 4  # times as long on a busy machine
AT_ONCE = min(8, count_processors())  # processes of a kind; more would slow each other down
_START_SECONDS = 60.0  # importing sympy on a busy machine
_SCRIPT = Path(__file__).with_name("checks.py")


FOREIGN, PARSES = "<foreign text>", 20
warnings.filterwarnings("ignore", category=SyntaxWarning, module=FOREIGN)  # its author does not read our stderr


class CheckerMissing(ModuleNotFoundError):
    """A check needs a package that is not installed."""


def parse_python(text: str, mode: str = "exec") -> Any:
    """Parse as `ast.parse` does, again where another thread disturbed it.

    CPython 3.11 counts the depth of all threads' trees in one place: two that are built at once can raise SystemError
    ("AST constructor recursion depth mismatch").
    """
    for _ in range(PARSES):
        with suppress(SystemError):
            return ast.parse(text, FOREIGN, mode)
    return ast.parse(text, FOREIGN, mode)


def read_literal(text: str) -> Any:
    """The value of a Python literal. Raises ValueError for what is none, or takes more than a second to read."""
    if not check("literal", text, seconds=1.0):
        raise ValueError("no Python literal, or one that takes too long to read")
    return ast.literal_eval(parse_python(text.lstrip(" \t"), "eval"))


def check(name: str, *arguments: Any, seconds: float | None = None) -> bool:
    """Make a check of `checks.py` with JSON arguments; False if it meets a limit, of time by default SECONDS.

    Waits for a free process. Thread-safe; an event loop calls it in a thread. Raises CheckerMissing.
    """
    return bool(_ask(name, *arguments, seconds=seconds))


def find_last(pattern: str, text: str) -> str | None:
    """The first group of ``pattern`` (Python's re, ignoring case; without groups: all of it) where it matches last.

    None if it does not match, or takes more than a second.
    """
    return _ask("last", pattern, text, seconds=1.0)


def _ask(name: str, *arguments: Any, seconds: float | None) -> Any:
    checkers = _start_pool("math" if name == "math" else "text")
    checker = checkers.get()
    try:
        return checker.ask(name, *arguments, seconds=seconds)
    finally:
        checkers.put(checker)


@cache
def _start_pool(task: str) -> queue.LifoQueue[Checker]:
    """The processes of this worker, started when needed; the one used last comes first."""
    pool: queue.LifoQueue[Checker] = queue.LifoQueue()
    for _ in range(AT_ONCE):
        pool.put(Checker(task))
    return pool


class Checker:
    """The parent's end of one process: started at the first check, and again after it was killed or died."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(self, name: str, *arguments: Any, seconds: float | None = None) -> Any:
        """The result of a check; None if it raises, takes more than ``seconds`` (SECONDS) or ends the process."""
        seconds = SECONDS if seconds is None else seconds
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([seconds, name, *arguments]) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=_WAIT * seconds)
        except (queue.Empty, BrokenPipeError):
            answer = ""
        if not answer:
            process.kill()
            process.wait()
            self._process = None
        if answer == "missing\n":
            raise CheckerMissing(
                "this ground truth is an expression, and comparing those needs math-verify: pip install 'coalign[math]'"
            )
        return json.loads(answer or "null")

    def _start(self) -> subprocess.Popen[str]:
        # -P: without it this folder leads the import path, and its modules could hide others.
        has_algebra = self._task == "math" and importlib.util.find_spec("latex2sympy2_extended") is not None
        command = [sys.executable, "-P", str(_SCRIPT), "algebra" if has_algebra else "plain"]
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_forward, args=(process.stdout, self._answers), daemon=True).start()
        try:
            ready = self._answers.get(timeout=_START_SECONDS) == "ready\n"
        except queue.Empty:
            ready = False
        if not ready:
            process.kill()
            self._process = None
            raise RuntimeError(f"a checker did not start; run `{' '.join(command)}` to see why")
        return process


def _forward(lines: Iterable[str], answers: queue.SimpleQueue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")
