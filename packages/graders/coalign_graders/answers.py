"""Graders of plain text: the response is the ground truth, holds it, shares words with it, or has a pattern."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from coalign_graders.checker import AT_ONCE, check
from coalign_graders.sample import GradedSample


def read_truths(sample: GradedSample, answer_key: str) -> list[str]:
    """The ground truths in the data set's row: one, or the items of a list, any of which is right.

    A text that looks like a list (`["1", "2"]`) is one truth. Raises KeyError or ValueError, naming the key, if there
    is none, or if an item is empty or a list itself.
    """
    if answer_key not in sample.meta:
        raise KeyError(f"the row has no '{answer_key}' to compare with; it has {sorted(sample.meta)} (set answer_key)")
    value = sample.meta[answer_key]
    items = list(value) if isinstance(value, (list, tuple, set)) else [value]
    truths = [str(item).strip() for item in items]
    if not all(truths) or None in items or not items:
        raise ValueError(f"the row's '{answer_key}' is empty: {value!r}")
    if any(isinstance(item, (list, tuple, set, dict)) for item in items):
        raise ValueError(f"the row's '{answer_key}' is {value!r:.80}; expected a text, a number, or a list of such")
    return truths


def remove_thoughts(response: str, prompt: str = "") -> str:
    """A response from its last `</think>` on; a block that is not finished is no answer, though ``prompt`` opens it."""
    opened = "<think>" if re.search(r"<think(?:ing)?>\s*\Z", prompt) else ""
    said = re.split(r"</think(?:ing)?>", opened + response)[-1]
    return re.split(r"<think(?:ing)?>", said, maxsplit=1)[0]


def exact_match(sample: GradedSample, *, answer_key: str = "answer", ignore_case: bool = False) -> float:
    """1.0 if the response is the ground truth, or one of a list of them, ignoring spaces around it."""
    response, truths = sample.response.strip(), read_truths(sample, answer_key)
    if ignore_case:
        response, truths = response.lower(), [truth.lower() for truth in truths]
    return float(response in truths)


def contains(sample: GradedSample, *, answer_key: str = "answer", ignore_case: bool = False) -> float:
    """1.0 if the ground truth, or one of a list of them, occurs in the response."""
    response, truths = sample.response, read_truths(sample, answer_key)
    if ignore_case:
        response, truths = response.lower(), [truth.lower() for truth in truths]
    return float(any(truth in response for truth in truths))


def f1(sample: GradedSample, *, answer_key: str = "answer") -> float:
    """The harmonic mean of precision and recall of the response's words, as SQuAD counts them (1606.05250, sec. 6.1).

    In lower case, without punctuation and English articles. A row with a list of truths counts the best of them. 0.0 if
    either has no words. A long response that also has the answer is worth little, unlike with ``contains``.
    """
    said = _count_words(sample.response)
    values = [0.0]
    for truth in read_truths(sample, answer_key):
        meant = _count_words(truth)
        if shared := (said & meant).total():
            values.append(2 * shared / (said.total() + meant.total()))
    return max(values)


def _count_words(text: str) -> Counter[str]:
    words = re.sub(r"[^\w\s]|_", "", text.lower()).split()
    return Counter(word for word in words if word not in ("a", "an", "the"))


async def regex(sample: GradedSample, *, pattern: str) -> float:
    """1.0 if the whole response matches ``pattern`` (Python's re; a dot matches line ends too): a format reward.

    0.0 if five seconds do not decide it: with two `.*?` a pattern can take hours, and nothing could interrupt it here.
    """
    _check_pattern(pattern=pattern)
    return float(await asyncio.to_thread(check, "pattern", pattern, sample.response.strip()))


def _check_pattern(*, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"regex: pattern is {pattern!r}: {error}") from None


regex.at_once, regex.check = AT_ONCE, _check_pattern
