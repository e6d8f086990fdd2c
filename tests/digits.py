"""A reward for test runs, in a module that imports nothing: each process that computes it loads the module."""

from typing import Any


def digits(sample: Any) -> float:
    """A dense reward that a random model can climb: the share of its response that is digits."""
    text = sample.response
    return sum(c.isdigit() for c in text) / max(1, len(text))
