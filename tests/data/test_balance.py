"""Parts of equal cost, and full micro-batches."""

from __future__ import annotations

import random
from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.data.batch import _pack_bins, estimate_costs, partition


def sums(costs, parts):
    return [sum(costs[i] for i in part) for part in partition(costs, parts)]


def test_differencing_by_hand():
    # 8-7=1, 6-5=1, 4-1=3, 3-1=2: {8, 6} against {7, 5, 4} (Karmarkar and Karp's own example).
    assert partition([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    # Three subsets: (8) (7) (6), then 5 to the 6 and 4 to the 7.
    assert partition([8, 7, 6, 5, 4], 3) == [[0], [1, 4], [2, 3]]


def test_few_indices_fill_the_first_parts():
    assert partition([5], 3) == [[0], [], []]
    assert partition([], 2) == [[], []]
    assert partition([0, 0, 3], 2) in ([[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]])


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_every_index_is_in_one_part_and_parts_differ_by_at_most_the_largest_cost(costs, parts):
    found = partition(costs, parts)
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    assert len(found) == parts and all(part == sorted(part) for part in found)
    filled = [part for part in found if part]
    assert len(filled) == min(parts, len(costs)) and found[: len(filled)] == sorted(filled)
    totals = [sum(costs[i] for i in part) for part in found]
    assert max(totals) - min(totals) <= max(costs, default=0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=9))
def test_two_parts_are_close_to_the_best_ones(costs):
    best = min(abs(sum(costs) - 2 * sum(some)) for n in range(len(costs)) for some in combinations(costs, n))
    found = sums(costs, 2)
    assert max(found) <= 7 / 6 * (sum(costs) + best) / 2  # Fischetti and Martello, 1987


def test_many_indices_are_dealt_out_evenly():
    draw = random.Random(0)
    costs = [draw.paretovariate(1.2) for _ in range(2000)]
    found = sums(costs, 16)
    assert max(found) <= max(1.0001 * sum(costs) / 16, max(costs))


def test_the_cost_of_a_sequence():
    assert torch.equal(estimate_costs(torch.tensor([0, 24576])), torch.tensor([0.0, 2 * 24576.0], dtype=torch.float64))


def test_bins_by_hand():
    assert _pack_bins([4, 4, 6, 6], 10) == [[2, 0], [3, 1]]
    assert _pack_bins([5, 7, 3, 2], 10) == [[1, 2], [0, 3]]  # the best fit for 3 is beside the 7
    assert _pack_bins([12, 3], 10) == [[0], [1]]
    assert _pack_bins([], 10) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(10, 40))
def test_bins_hold_everything_once_within_their_room_and_waste_little(sizes, room):
    bins = _pack_bins(sizes, room)
    assert sorted(i for each in bins for i in each) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in each) <= room or len([i for i in each if sizes[i]]) == 1 for each in bins)
    fitting = [size for size in sizes if size <= room]
    own = sum(size > room for size in sizes)
    assert len(bins) - own <= 11 / 9 * -(-sum(fitting) // room) * 1.5 + 1
