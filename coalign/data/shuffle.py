"""Counter-based randomness: draws follow from numbers, so that a checkpoint needs only a cursor.

DataPhase divides the rows of a data set between several runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

ROUNDS = 6


def draw_uniform(*key: int) -> float:
    """Draw a number in [0, 1); equal keys give equal numbers."""
    return (_hash(key) >> 11) / 2**53


def permute(index: int, n: int, *key: int) -> int:
    """Apply the key's permutation of 0..n-1 to ``index``, in O(1) memory.

    It is a Feistel network over the next even number of bits, repeated until the result is below n: following the
    cycles of a bijection of the larger domain gives a bijection of 0..n-1 (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002).
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


SALT = 0x5EED  # instead of the run's seed, because all runs that share a data set must agree


class DataPhase:
    """The set of row numbers that belong to one of several phases; phases share no row.

    Weights (to a thousandth) become whole numbers in lowest terms: {sft: 2, rm: 4, rl: 4} is 1:2:2. Rows are divided in
    blocks of 1 + 2 + 2: each block gives one row to the first phase, two to the second and two to the third, chosen by
    a hash of the block's number. So the shares are exact to within one block, for any number of rows.
    """

    def __init__(self, weights: Mapping[str, float], name: str) -> None:
        """``name`` is one of ``weights``. ValueError if its share is 0."""
        self.name = name
        total = sum(map(Fraction, weights.values())) or 1
        exact = {phase: (Fraction(weight) / total).limit_denominator(1000) for phase, weight in weights.items()}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        rows_per_block = {phase: int(weight * scale) for phase, weight in exact.items()}
        if not rows_per_block[name]:
            raise ValueError(f"data.phases.{name} is {weights[name]}, which leaves no row for this run's data.phase")
        common = gcd(*rows_per_block.values())
        self._block = sum(rows_per_block.values()) // common
        self._start = sum(weight for phase, weight in rows_per_block.items() if phase < name) // common
        self._stop = self._start + rows_per_block[name] // common

    @property
    def share(self) -> list[int]:
        """Block size, first and end position of the phase in a block; equal for phases with the same rows."""
        return [self._block, self._start, self._stop]

    def __contains__(self, number: int) -> bool:
        block, position = divmod(number, self._block)
        return self._start <= permute(position, self._block, SALT, block) < self._stop
