"""Rewards for how long a response is, in tokens that the model chose."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from coalign.rewards.nested import Nested, Valuing
from coalign.types import Sample

Ends = Annotated[list[float], Field(min_length=2, max_length=2)]


def length_penalty(sample: Sample, *, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to max_tokens - buffer response tokens, falling
    linearly to -1 at max_tokens, -1 beyond."""
    _check_penalty(max_tokens=max_tokens, buffer=buffer)
    over = tokens(sample) - (max_tokens - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


def length_range(sample: Sample, *, min_tokens: NonNegativeInt = 0, max_tokens: PositiveInt) -> float:
    """1.0 for a response of ``min_tokens`` to ``max_tokens`` (both included), else 0.0."""
    _check_range(min_tokens=min_tokens, max_tokens=max_tokens)
    return float(min_tokens <= tokens(sample) <= max_tokens)


def length_target(sample: Sample, *, target: PositiveInt, tolerance: PositiveInt) -> float:
    """1.0 for a response of ``target`` tokens, falling linearly to 0.0 at ``tolerance`` tokens more or fewer."""
    return max(0.0, 1.0 - abs(tokens(sample) - target) / tolerance)


class CosineLength:
    """The cosine reward of Yeo et al. (arXiv:2502.03373, sec. 4.2):
    a right response earns more the shorter it is, a wrong one loses less the longer it tried.

    With t tokens of ``max_tokens`` L, from r_0 at no token to r_L: r_L + (r_0 - r_L) (1 + cos(π t / L)) / 2, where
    (r_0, r_L) is ``right`` if the reward function ``by`` (a name, or a mapping with ``fn`` and its arguments) returns
    ``threshold`` or more, else ``wrong``; and ``exceeded`` for L tokens or more. Also logs `right`, 1 or 0.
    """

    def __init__(
        self,
        *,
        by: Valuing,
        max_tokens: PositiveInt,
        right: Ends = (2.0, 1.0),
        wrong: Ends = (-10.0, 0.0),
        exceeded: float = -10.0,
        threshold: float = 0.5,
    ) -> None:
        self._by = Nested(by)
        self._limit, self._right, self._wrong = max_tokens, right, wrong
        self._exceeded, self._threshold = exceeded, threshold

    async def __call__(self, sample: Sample) -> dict[str, float]:
        (value,) = await self._by([(sample,)])
        right, count = value >= self._threshold, tokens(sample)
        if count >= self._limit:
            return {"reward": self._exceeded, "right": right}
        first, last = self._right if right else self._wrong
        return {"reward": last + (first - last) * (1 + math.cos(math.pi * count / self._limit)) / 2, "right": right}


def tokens(sample: Sample) -> int:
    """How many tokens of the sample the model chose. ValueError where nobody has counted them (a file of texts)."""
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


length_penalty.check, length_range.check = _check_penalty, _check_range
