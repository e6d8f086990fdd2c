"""What rewards compare by, for processes of their own, each of which loads this module."""

import asyncio
import os
import re


def longer(first, second):
    return 0.5 * (1 + (len(first.response) > len(second.response)) - (len(first.response) < len(second.response)))


async def longer_async(first, second, *, sharp=True):
    await asyncio.sleep(0)
    return longer(first, second) if sharp else 0.5


class Longer:
    def __init__(self, *, by=1.0):
        self.by = by

    async def __call__(self, first, second):
        return longer(first, second)


def first_one(first, second):
    return 0.8


def strange(first, second, *, returned):
    return {"none": None, "text": "1", "two": 2.0, "below": -0.1, "nan": float("nan")}[returned]


def fails(first, second):
    raise KeyError(f"{first.response}{second.response}")


def grouped(group):
    return [0.0 for _ in group]


def backtracks(first, second):
    """Holds the interpreter for hours where a response is bad."""
    return float(re.fullmatch(r"(a+)+b", "a" * 60 if "bad" in first.response + second.response else "ab") is not None)


async def backtracks_async(first, second):
    return backtracks(first, second)


def backtracks_alone(sample):
    return backtracks(sample, sample)


def exits(first, second):
    if "bad" in first.response:
        os._exit(1)
    return 0.5
