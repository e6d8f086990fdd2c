"""Rewards of test runs, in a module that imports nothing: each process that computes one loads its module."""

from pathlib import Path
from typing import Any

from tests.digits import digits


def always(sample: Any) -> float:
    return 1.0


def never_differs(sample: Any) -> float:
    return 0.5


def length(sample: Any) -> float:
    return float(len(sample.response))


def odd_groups_differ(sample: Any) -> float:
    """Samples of even groups all earn the same, those of odd ones earn their index."""
    return float(sample.index) if sample.group % 2 else 1.0


def refuses_some(sample: Any, *, broken: str) -> float:
    """Refuses samples of weight version 2 while the file ``broken`` is there."""
    if int(sample.versions[-1][0]) == 2 and Path(broken).exists():
        raise ValueError("the service is gone")
    return digits(sample)
