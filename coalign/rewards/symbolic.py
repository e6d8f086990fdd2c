"""Symbolic equality by math-verify (the extra [math]), in a separate process that can be killed.

A response can hold anything, such as `9^{9^{9^9}}`. Computer algebra then runs for hours inside one C call, which no
signal and no thread timeout can interrupt. Run as a script, this file is the child's end of the pipe.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

_SECONDS = 5.0  # for one comparison; usual ones take milliseconds
_START_SECONDS = 60.0  # importing sympy on a busy machine
_MEMORY = 4 << 30  # bytes of address space


def equivalent(gold: str, predicted: str) -> bool:
    """Whether two LaTeX or plain expressions are equal; False if 5 s do not decide it. Thread-safe.

    Raises ModuleNotFoundError if math-verify is not installed.
    """
    checkers = _checkers()
    checker = checkers.get()
    try:
        return checker.ask(gold, predicted)
    finally:
        checkers.put(checker)


@cache
def _checkers() -> queue.LifoQueue[Checker]:
    """The processes of this worker, started when needed; the one used last comes first."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "this ground truth is an expression, and comparing those needs math-verify: pip install 'coalign[math]'"
        )
    checkers: queue.LifoQueue[Checker] = queue.LifoQueue()
    for _ in range(min(8, os.cpu_count() or 1)):
        checkers.put(Checker())
    return checkers


class Checker:
    """The parent's end of one process: started at the first question, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def ask(self, gold: str, predicted: str, *, seconds: float = _SECONDS) -> bool:
        """Whether the two are equal; False if that takes more than ``seconds`` or too much memory."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps([gold, predicted]) + "\n")
        process.stdin.flush()
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            answer = ""
        if not answer:
            process.kill()
            process.wait()
            self._process = None
        return answer == "1\n"

    def _start(self) -> subprocess.Popen[str]:
        # -P: without it this folder leads the import path, and its modules could hide others.
        command = [sys.executable, "-P", __file__]
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers = queue.Queue()
        threading.Thread(target=_forward, args=(process.stdout, self._answers), daemon=True).start()
        if self._answers.get(timeout=_START_SECONDS) != "ready\n":
            raise RuntimeError(f"math-verify did not start; run `{' '.join(command)}` to see why")
        return process


def _forward(lines: Iterable[str], answers: queue.Queue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")


def _serve() -> None:
    """The child's end: one JSON pair a line in, 1 or 0 a line out."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers, sys.stdout = sys.stdout, sys.stderr
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        try:
            gold, predicted = (_parse(parse, text) for text in json.loads(line))
            equal = verify(gold, predicted, timeout_seconds=None)
        except Exception:  # an expression that breaks the algebra equals nothing
            equal = False
        answers.write(f"{int(equal)}\n")
        answers.flush()


def _parse(parse: Callable[..., Any], text: str) -> Any:
    # The parent keeps the time; math-verify's own timeouts are signals.
    return parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)


if __name__ == "__main__":
    _serve()
