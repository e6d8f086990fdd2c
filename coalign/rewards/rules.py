"""Rewards that need nothing but the text."""

from __future__ import annotations

import re

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


def length_penalty(sample: Sample, *, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to max_tokens - buffer response tokens, falling
    linearly to -1 at max_tokens, -1 beyond. Counts trained tokens."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"length_penalty: buffer={buffer} must lie in 1..max_tokens={max_tokens}")
    over = int(sample.loss_mask.sum()) - (max_tokens - buffer)
    return -min(max(over / buffer, 0.0), 1.0)
