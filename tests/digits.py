"""A reward for test runs, in a module that imports nothing: each process that computes it loads the module."""

from typing import Any


def digits(sample: Any) -> float:
    """A dense reward that a random model can climb: the share of its response that is digits."""
    text = sample.response
    return sum(c.isdigit() for c in text) / max(1, len(text))


def rubric(sample: Any) -> dict[str, float]:
    """What the rubric of tests/recipes/test_rlaif.py is worth: 1 · "1" + 3 · "2" - 1 · "3", of 4."""
    one, two, three = (float(digit in sample.response) for digit in "123")
    return {"reward": max(0.0, one + 3 * two - three) / 4, "two": two}
