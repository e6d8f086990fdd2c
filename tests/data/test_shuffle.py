"""Permutations and uniform numbers by counter."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.data.shuffle import draw_uniform, permute


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 5))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_every_index_once(n, seed, epoch):
    assert sorted(permute(i, n, seed, epoch) for i in range(n)) == list(range(n))


def test_pinned_values():
    """Runs must resume in the same order on another machine and after an upgrade."""
    assert [permute(i, 10, 0, 0) for i in range(10)] == [0, 5, 8, 3, 4, 1, 7, 9, 2, 6]
    assert permute(10**12, 10**13, 1, 2) == 7336253818341


def test_each_place_is_equally_likely():
    n, epochs = 5, 4000
    for index in (0, 3):
        counts = Counter(permute(index, n, 7, epoch) for epoch in range(epochs))
        chi2 = sum((counts[place] - epochs / n) ** 2 / (epochs / n) for place in range(n))
        assert chi2 < 18.5  # 0.1 % with 4 degrees of freedom


def test_neighbours_do_not_stay_neighbours():
    n = 1000
    places = [permute(i, n, 3) for i in range(n)]
    adjacent = sum(abs(a - b) == 1 for a, b in pairwise(places))
    assert adjacent < 10  # 2 are expected


def test_outside_is_refused():
    with pytest.raises(IndexError, match=r"5 does not lie in 0\.\.4"):
        permute(5, 5, 0)


def test_uniform_numbers_are_uniform_and_belong_to_their_key():
    values = [draw_uniform(1, i) for i in range(2000)]
    assert values == [draw_uniform(1, i) for i in range(2000)]
    assert all(0.0 <= v < 1.0 for v in values) and len(set(values)) == 2000
    counts = Counter(int(v * 10) for v in values)
    assert sum((counts[b] - 200) ** 2 / 200 for b in range(10)) < 27.9  # 0.1 % with 9 degrees of freedom
    assert draw_uniform(1, 23) != draw_uniform(12, 3)
