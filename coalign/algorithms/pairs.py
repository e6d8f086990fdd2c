"""All pairs of a better and a worse response in each group of a micro-batch.

A group of n responses with different preferences has n(n - 1)/2 pairs, so chosen / rejected data and rankings of k
responses (2203.02155, section 3.5) are one case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coalign.algorithms.segments import segment_count, segment_sum
from coalign.algorithms.traits import column, read
from coalign.types import LossInput


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs: sequence ``winner[p]`` is preferred to ``loser[p]`` of the same group ``group[p]``, 0..groups-1."""

    winner: Tensor  # i64[P]
    loser: Tensor  # i64[P]
    group: Tensor  # i64[P], never decreasing
    groups: int

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values`` [N] of the winners and of the losers, [P] each."""
        return values[self.winner], values[self.loser]

    def difference(self, values: Tensor) -> Tensor:
        """[P]: how much more the winner has of ``values`` [N]."""
        return values[self.winner] - values[self.loser]

    def mean(self, values: Tensor) -> Tensor:
        """[G]: the mean of ``values`` [P] over the pairs of each group; 0 for a group without pairs."""
        return segment_sum(values, self.group, self.groups) / segment_count(self.group, self.groups).clamp(min=1)


def preferred(preference: Tensor, group: Tensor, groups: int) -> Pairs:
    """Every pair (i, j) of one group with ``preference[i] > preference[j]``; both [N], ``group`` never decreasing.

    Equal preferences make no pair. Work and memory grow with the sum of the squared group sizes.
    """
    sizes = segment_count(group, groups)
    partners = sizes[group]
    first = torch.arange(len(group), device=group.device).repeat_interleave(partners)
    position = torch.arange(len(first), device=group.device) - (partners.cumsum(0) - partners)[first]
    second = (sizes.cumsum(0) - sizes)[group[first]] + position
    better = preference[first] > preference[second]
    winner = first[better]
    return Pairs(winner, second[better], group[winner], groups)


def pairs_of(x: LossInput) -> Pairs:
    """The pairs of a micro-batch, by its column `preference`; ValueError if it is missing."""
    return preferred(column(x, "preference"), read(x, "group"), x.groups)
