"""Cutting work into parts that take equally long, and filling micro-batches: pure functions on numbers."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from torch import Tensor

# The length at which a token costs as much in attention as in everything else: 12 times the hidden size, here 2048
# (per layer 24 h² operations for the matrices, and 2 h L for causal attention).
ATTENTION_LENGTH = 24576

Subset = tuple[float, list[int]]  # minus the sum of some costs (so the largest come first), and which they are


def estimate_costs(lengths: Tensor) -> Tensor:
    """f64[N]: what the forward pass over a sequence of each length costs, in tokens of a short one."""
    lengths = lengths.double()
    return lengths + lengths.square() / ATTENTION_LENGTH


def partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of ``costs`` in ``parts`` subsets of nearly equal sums, each ascending, in the order of their first ones.

    Largest differencing (Karmarkar and Karp, "The differencing method of set partitioning", 1982) for any number of
    subsets: the two partial partitions with the greatest differences are joined, the largest subset of one with the
    smallest of the other. Empty subsets come last, and only where there are fewer indices than parts.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    heap = [(-estimate_costs, index, [(-estimate_costs, [index])]) for index, estimate_costs in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, index, other = heapq.heappop(heap)
        joined = _join(one, other, parts)
        smallest = joined[-1][0] if len(joined) == parts else 0.0
        heapq.heappush(heap, (joined[0][0] - smallest, index, joined))
    found = sorted(sorted(members) for _, members in heap[0][2]) if heap else []
    return found + [[] for _ in range(parts - len(found))]


def _join(one: list[Subset], other: list[Subset], parts: int) -> list[Subset]:
    """Both partitions, largest subset first, as one of at most ``parts`` subsets."""
    over = max(len(one) + len(other) - parts, 0)  # so many have to be joined: the smallest of one, of the other
    alone = one[: len(one) - over] + other[: len(other) - over]
    pairs = zip(one[len(one) - over :], reversed(other[len(other) - over :]), strict=True)
    return sorted(alone + [(a + b, x + y) for (a, x), (b, y) in pairs])


def pack_bins(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Indices of ``sizes`` in as few bins of ``room`` as best fit decreasing finds (Johnson, "Near-optimal bin packing
    algorithms", 1973), large ones first; what is larger than ``room`` has a bin of its own."""
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect_left(left, (sizes[index], 0))
        free, number = left.pop(place) if place < len(left) else (room, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(left, (free - sizes[index], number))
    return bins
