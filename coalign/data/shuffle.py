"""Randomness by counter: what is drawn follows from numbers, so a cursor is all there is to save.

One data set for several runs: shares of its rows that never meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

ROUNDS = 6


def draw_uniform(*key: int) -> float:
    """A number in [0, 1) that belongs to the key."""
    return (_hash(key) >> 11) / 2**53


def permute(index: int, n: int, *key: int) -> int:
    """Where the key's permutation of 0..n-1 sends ``index``; in O(1) memory.

    A Feistel network over the next even number of bits, walked until it lands below n: following the cycles of a
    bijection of the larger domain gives one of 0..n-1 (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002).
    """
    if not 0 <= index < n:
        raise IndexError(f"{index} does not lie in 0..{n - 1}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for step in range(ROUNDS):
            left, right = right, left ^ (_hash((*key, n, step, right)) & low)
        index = left << half | right
        if index < n:
            return index


def _hash(numbers: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


SALT = 0x5EED  # not the run's seed: the runs of a pipeline must agree


class DataPhase:
    """The row numbers that belong to one of several phases.

    The shares (to a thousandth) become whole numbers in lowest terms ({sft: 2, rm: 4, rl: 4} is 1:2:2), and the rows
    are dealt in hands of 1 + 2 + 2: from each hand one row goes to the first phase, two to the second, two to the
    third; which ones follows from a hash of the hand's number. So the shares are exact to within one hand, and nobody
    needs to know how many rows there are.
    """

    def __init__(self, weights: Mapping[str, float], name: str) -> None:
        """``name`` is one of ``weights``. ValueError if its share is nothing."""
        self.name = name
        total = sum(map(Fraction, weights.values())) or 1
        exact = {phase: (Fraction(weight) / total).limit_denominator(1000) for phase, weight in weights.items()}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        whole = {phase: int(weight * scale) for phase, weight in exact.items()}
        if not whole[name]:
            raise ValueError(f"data.phases.{name} is {weights[name]}, which leaves no row for this run's data.phase")
        common = gcd(*whole.values())
        self._hand = sum(whole.values()) // common
        self._start = sum(weight for phase, weight in whole.items() if phase < name) // common
        self._stop = self._start + whole[name] // common

    @property
    def share(self) -> list[int]:
        """Rows of a hand, and which of its places belong to the phase: equal for phases with the same rows."""
        return [self._hand, self._start, self._stop]

    def __contains__(self, number: int) -> bool:
        hand, place = divmod(number, self._hand)
        return self._start <= permute(place, self._hand, SALT, hand) < self._stop
