"""Rewards that need nothing but the text."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from coalign.types import Sample


def truth(sample: Sample, answer_key: str) -> str:
    """The ground truth in the data set's row. Raises KeyError or ValueError, naming the key, if there is none."""
    if answer_key not in sample.meta:
        raise KeyError(f"the row has no '{answer_key}' to compare with; it has {sorted(sample.meta)} (set answer_key)")
    answer = str(sample.meta[answer_key]).strip()
    if sample.meta[answer_key] is None or not answer:
        raise ValueError(f"the row's '{answer_key}' is empty: {sample.meta[answer_key]!r}")
    return answer


def exact_match(sample: Sample, *, answer_key: str = "answer", ignore_case: bool = False) -> float:
    """1.0 if the response is the ground truth, spaces around it aside."""
    response, answer = sample.response.strip(), truth(sample, answer_key)
    return float(response.lower() == answer.lower() if ignore_case else response == answer)


def contains(sample: Sample, *, answer_key: str = "answer", ignore_case: bool = False) -> float:
    """1.0 if the ground truth occurs in the response."""
    response, answer = sample.response, truth(sample, answer_key)
    return float(answer.lower() in response.lower() if ignore_case else answer in response)


def regex(sample: Sample, *, pattern: str) -> float:
    """1.0 if the whole response matches ``pattern`` (Python's re; a dot matches line ends too): a format reward."""
    return float(re.fullmatch(pattern, sample.response.strip(), re.DOTALL) is not None)


def tags(
    sample: Sample,
    *,
    tags: Annotated[list[str], Field(min_length=1)] = ("think", "answer"),
    opened: bool = False,
    text_outside: bool = False,
) -> float:
    """1.0 if the response is `<think>…</think> <answer>…</answer>`: every one of ``tags`` opened once and closed once,
    one after the other in this order, something inside each, and nothing but space outside. Else 0.0.

    ``opened``: the prompt has already opened the first one. ``text_outside``: text before, between and behind is fine.
    """
    text = f"<{tags[0]}>" * opened + sample.response
    place = 0
    for tag in tags:
        start, stop = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(stop) != 1:
            return 0.0
        first, last = text.index(start), text.index(stop)
        outside, inside = text[place:first], text[first + len(start) : last]
        if first < place or not inside.strip() or (outside.strip() and not text_outside):
            return 0.0
        place = last + len(stop)
    return float(text_outside or not text[place:].strip())
