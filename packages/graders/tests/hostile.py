"""Reward functions that hang, exit or crash, for processes of their own, each of which loads this module."""

import asyncio
import ctypes
import os
import re
import sys
import time
from pathlib import Path

from coalign.services import ServiceError


def length(sample):
    return float(len(sample.response))


def backtracks(sample):
    """Holds the interpreter for hours where the response is bad: no thread of this process runs meanwhile."""
    return float(re.fullmatch(r"(a+)+b", "a" * 60 if "bad" in sample.response else "ab") is not None)


async def backtracks_async(sample):
    await asyncio.sleep(0.01)
    return backtracks(sample)


async def waits(sample):
    await asyncio.sleep(30 if "bad" in sample.response else 0.01)
    return 1.0


async def exits_async(sample):
    await asyncio.sleep(0.01)
    return exits(sample)


def exits(sample):
    if "bad" in sample.response:
        os._exit(1)
    return 1.0


def crashes(sample):
    if "bad" in sample.response:
        ctypes.string_at(0)
    return 1.0


def hoards(sample):
    """Fills 400 MB where the response is bad."""
    return float(len(bytearray(400 << 20)) > 0) if "bad" in sample.response else 1.0


def raises(sample):
    if "bad" in sample.response:
        raise LookupError("no such key")
    return 1.0


class OddError(Exception):
    """Cannot be unpickled: its constructor needs two arguments and hands on one."""

    def __init__(self, code, text):
        super().__init__(text)


def raises_oddly(sample):
    raise OddError(3, "odd")


def returns_odd(sample):
    return lambda: 0


def reads_everything(sample):
    """Of a sample whose tensors nobody has made yet."""
    assert "torch" not in sys.modules and sample.messages == [] and sample.meta == {"answer": "1"}
    tokens = int(sample.loss_mask.sum()) + len(sample.tokens) + len(sample.logprobs)
    assert sample.turn_rewards is None and sample.status.name == "OK" and not hasattr(sample, "other")
    return float(tokens)


def has_torch(sample):
    return float("torch" in sys.modules or "transformers" in sys.modules)


def process(sample):
    time.sleep(0.3)
    return float(os.getpid())


def oom_score(sample):
    return float(Path("/proc/self/oom_score_adj").read_text())


class Counter:
    """Counts its calls; a bad response ends the process."""

    def __init__(self, *, start=0):
        if start < 0:
            raise ValueError(f"start is {start}")
        self.calls = start

    def __call__(self, sample):
        self.calls += 1
        return exits(sample) * self.calls


def shortest(group):
    return [float(len(one.response) == min(len(s.response) for s in group)) for one in group]


def busy_service(sample, *, log):
    """A service that fails for the first three calls, which it counts in a file."""
    path = Path(log)
    calls = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (calls + 1))
    if calls < 3:
        raise ServiceError("starting", 0.05)
    return 1.0


def _digits(sample):
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


def exits_on_the_second(sample):
    if sample.index == 1:
        os._exit(1)
    return _digits(sample)


def backtracks_on_the_second(sample):
    if sample.index == 1:
        re.fullmatch(r"(a+)+b", "a" * 60)
    return _digits(sample)


def crashes_on_the_second(sample):
    if sample.index == 1:
        ctypes.string_at(0)
    return _digits(sample)
