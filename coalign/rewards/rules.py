"""Rewards by rule: from the response's text, its length, or the rewards of its environment."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from coalign.rewards.calls import NestedFunction, ValueFunction
from coalign.types import Sample


def tags(
    sample: Sample,
    *,
    tags: Annotated[Sequence[str], Field(min_length=1)] = ("think", "answer"),
    opened: bool = False,
    text_outside: bool = False,
) -> float:
    """1.0 if the response is `<think>…</think> <answer>…</answer>`, else 0.0.

    Each of ``tags`` must open once and close once, in this order, with text inside and only space outside. ``opened``:
    the prompt has already opened the first tag. ``text_outside`` allows text before, between and after them.
    """
    text = f"<{tags[0]}>" * opened + sample.response
    end = 0
    for tag in tags:
        start, stop = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(stop) != 1:
            return 0.0
        first, last = text.index(start), text.index(stop)
        outside, inside = text[end:first], text[first + len(start) : last]
        if first < end or not inside.strip() or (outside.strip() and not text_outside):
            return 0.0
        end = last + len(stop)
    return float(text_outside or not text[end:].strip())


def repetition_penalty(sample: Sample, *, n: PositiveInt = 4, unit: Literal["words", "characters"] = "words") -> float:
    """Minus the share of the response's n-grams that repeat an earlier one: 0.0 if all differ, towards -1.0 for a loop.

    Words are runs of letters, digits and underscores, in lower case; `characters` (without spaces) suit scripts that do
    not separate words. 0.0 for fewer than n units.
    """
    text = sample.response.lower()
    units = re.findall(r"\w+" if unit == "words" else r"\S", text)
    grams = list(zip(*(units[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def script(sample: Sample, *, scripts: Annotated[list[str], Field(min_length=1)]) -> float:
    """The share of the response's letters whose Unicode name begins with one of ``scripts``; 1.0 without letters.

    Scripts are `LATIN`, `CYRILLIC`, `CJK`, `HIRAGANA`, … So this tells Chinese from English, but not French from
    English.
    """
    prefixes = tuple(name.upper() for name in scripts)
    letters = [character for character in sample.response if character.isalpha()]
    inside = sum(unicodedata.name(letter, "").startswith(prefixes) for letter in letters)
    return inside / len(letters) if letters else 1.0


Ends = Annotated[Sequence[float], Field(min_length=2, max_length=2)]


def length_penalty(sample: Sample, *, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    0 up to max_tokens - buffer response tokens, falling linearly to -1 at max_tokens, -1 beyond.
    """
    _check_penalty(max_tokens=max_tokens, buffer=buffer)
    over = count_tokens(sample) - (max_tokens - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


def length_range(sample: Sample, *, min_tokens: NonNegativeInt = 0, max_tokens: PositiveInt) -> float:
    """1.0 for a response of ``min_tokens`` to ``max_tokens`` (both included), else 0.0."""
    _check_range(min_tokens=min_tokens, max_tokens=max_tokens)
    return float(min_tokens <= count_tokens(sample) <= max_tokens)


def length_target(sample: Sample, *, target: PositiveInt, tolerance: PositiveInt) -> float:
    """1.0 for a response of ``target`` tokens, falling linearly to 0.0 at ``tolerance`` tokens more or fewer."""
    return max(0.0, 1.0 - abs(count_tokens(sample) - target) / tolerance)


class CosineLength:
    """The cosine reward of Yeo et al. (arXiv:2502.03373, sec. 4.2): right responses earn more the shorter they are.

    A wrong response loses less the longer it is. With t tokens of ``max_tokens`` L, from r_0 at no token to r_L, the
    reward is r_L + (r_0 - r_L) (1 + cos(π t / L)) / 2. (r_0, r_L) is ``right`` if the reward function ``by`` (a name,
    or a mapping with ``fn`` and its arguments) returns ``threshold`` or more, else ``wrong``. From L tokens on the
    reward is ``exceeded``. Also logs `right`, 1 or 0.
    """

    def __init__(
        self,
        *,
        by: ValueFunction,
        max_tokens: PositiveInt,
        right: Ends = (2.0, 1.0),
        wrong: Ends = (-10.0, 0.0),
        exceeded: float = -10.0,
        threshold: float = 0.5,
    ) -> None:
        self._by = NestedFunction(by)
        self.start, self.at_once = self._by.start, self._by.at_once
        self._limit, self._right, self._wrong = max_tokens, right, wrong
        self._exceeded, self._threshold = exceeded, threshold

    async def __call__(self, sample: Sample) -> dict[str, float]:
        (value,) = await self._by([(sample,)])
        right, count = value >= self._threshold, count_tokens(sample)
        if count >= self._limit:
            return {"reward": self._exceeded, "right": right}
        first, last = self._right if right else self._wrong
        return {"reward": last + (first - last) * (1 + math.cos(math.pi * count / self._limit)) / 2, "right": right}


def count_tokens(sample: Sample) -> int:
    """The number of tokens that the model chose. ValueError if they are unknown (samples read from a text file)."""
    count = int(sample.loss_mask.sum())
    if not count and sample.response:
        raise ValueError("the response's tokens are not known here, so its length cannot be rewarded")
    return count


def _check_penalty(*, max_tokens: int, buffer: int) -> None:
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"length_penalty: buffer={buffer} must lie in 1..max_tokens={max_tokens}")


def _check_range(*, min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise ValueError(f"length_range: min_tokens={min_tokens} is more than max_tokens={max_tokens}")


def _find_late_penalty(longest: int, *, max_tokens: int, buffer: int) -> str:
    start = max_tokens - buffer
    return f"length_penalty begins after {start} tokens (max_tokens - buffer)" if start >= longest else ""


def _find_long_range(longest: int, *, min_tokens: int, max_tokens: int) -> str:
    return f"length_range.min_tokens is {min_tokens}" if min_tokens > longest else ""


def _find_far_target(longest: int, *, target: int, tolerance: int) -> str:
    return f"length_target rewards none below {target - tolerance + 1} tokens" if target - tolerance >= longest else ""


length_penalty.check, length_range.check = _check_penalty, _check_range
length_penalty.check_longest, length_range.check_longest = _find_late_penalty, _find_long_range
length_target.check_longest = _find_far_target


def episode(sample: Sample) -> float:
    """The sum of the environment's rewards for the turns (`Episode.reward`).

    Raises ValueError for a sample that no environment played.
    """
    if sample.turn_rewards is None:
        raise ValueError("no environment gave this sample a reward: `rollout.fn` names one (docs/environments.md)")
    return float(sample.turn_rewards.double().sum())


episode.sums_turns = True  # so that a turn can be rewarded by itself
