"""Tools and users that need nothing of Coalign, for processes of their own, each of which loads this module."""

import os
import re
import time
from pathlib import Path
from typing import Literal

from coalign.services import ServiceError


def lookup(word: str, times: int = 1, kind: Literal["a", "b"] = "a", *, prefix: str = "") -> str:
    """Looks a word up."""
    return prefix + word * times


def draw(path: str, size: int = 3) -> list:
    """Draws."""
    return ["A drawing: ", {"type": "image", "path": path}, {"type": "text", "text": "x" * size}]


def breaks(x: int) -> str:
    raise RuntimeError(f"no {x}")


def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def babbles() -> str:
    return "x" * 10_000


def backtracks(text: str) -> str:
    return str(re.fullmatch(r"(a+)+b", text))


def exits() -> str:
    os._exit(1)


def remote(*, log: str) -> str:
    """Asks a service that fails for the first three calls, which it counts in a file."""
    path = Path(log)
    calls = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (calls + 1))
    if calls < 3:
        raise ServiceError("starting")
    return "here"


def draws(messages, row, random):
    return f"What is {random.random()}?"


def asks_on(messages, row, random):
    return None if messages[-1]["content"] == "bye" else f"And {row['answer']}?"


def hangs(messages, row, random):
    return backtracks("a" * 60) if messages[-1]["content"] == "bad" else "Well?"
