"""Balanced partitions of work, and packing of sequences into micro-batches: pure functions on numbers."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from torch import Tensor

# The length at which attention costs a token as much as everything else does: 12 times the hidden size, here 2048.
# (Per layer and token: 24 h² operations for the matrices, 2 h L for causal attention.)
ATTENTION_LENGTH = 24576

Subset = tuple[float, list[int]]  # minus the sum of some costs (so the largest sum sorts first), and their indices


def estimate_costs(lengths: Tensor) -> Tensor:
    """f64[N]: the cost of a forward pass over a sequence of each length, in tokens of a short sequence."""
    lengths = lengths.double()
    return lengths + lengths.square() / ATTENTION_LENGTH


def partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide the indices of ``costs`` into ``parts`` subsets of nearly equal sums.

    Indices ascend within a subset, and subsets are ordered by their first index. Empty subsets come last, and exist
    only if there are fewer indices than parts.

    Largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning", 1982), for any
    number of subsets: join the two partial partitions with the greatest differences, the largest subset of one with
    the smallest of the other, until one partition is left.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    heap = [(-cost, index, [(-cost, [index])]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, index, other = heapq.heappop(heap)
        joined = _join(one, other, parts)
        smallest = joined[-1][0] if len(joined) == parts else 0.0
        heapq.heappush(heap, (joined[0][0] - smallest, index, joined))
    subsets = sorted(sorted(members) for _, members in heap[0][2]) if heap else []
    return subsets + [[] for _ in range(parts - len(subsets))]


def _join(one: list[Subset], other: list[Subset], parts: int) -> list[Subset]:
    """Join two partitions (largest subset first) into one of at most ``parts`` subsets."""
    excess = max(len(one) + len(other) - parts, 0)  # subsets to merge in pairs: the smallest ones of each side
    separate = one[: len(one) - excess] + other[: len(other) - excess]
    pairs = zip(one[len(one) - excess :], reversed(other[len(other) - excess :]), strict=True)
    return sorted(separate + [(a + b, x + y) for (a, x), (b, y) in pairs])


def pack_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack the indices of ``sizes`` into few bins of ``capacity``; a larger item gets a bin of its own.

    Best fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): large items first.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free capacity, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        position = bisect_left(free, (sizes[index], 0))
        left, number = free.pop(position) if position < len(free) else (capacity, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(free, (left - sizes[index], number))
    return bins
