"""Randomness by counter: what is drawn follows from numbers, so a cursor is all there is to save."""

from __future__ import annotations

import hashlib

ROUNDS = 6


def uniform(*key: int) -> float:
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
