"""Rewards from comparisons within a group: the responses to one prompt are ranked against each other.

The first functions turn comparisons into a value for each item and pair items for the next round; the classes are the
rewards built on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt

from coalign.rewards.calls import ComparisonFunction, NestedFunction
from coalign.types import Sample

_NEWTON_STEPS = 10_000  # far more than any group needs
# The curvature changes by a factor of at most exp(|Δ(θ_i - θ_j)|), so a Newton step of up to this always goes uphill.
_REACH = 0.3


class Comparison(NamedTuple):
    """A comparison of two items by index.

    ``won`` is the first item's share of the win: 1, 0.5 (draw), 0, or between.
    """

    first: int
    second: int
    won: float


def win_rates(games: Sequence[Comparison], count: int) -> list[float]:
    """The share of its games that each item won, a draw counting half; 0.5 for an item without a game."""
    won, played = _points(games, count), _play(games, count)
    return [won[i] / played[i] if played[i] else 0.5 for i in range(count)]


def bradley_terry(games: Sequence[Comparison], count: int, prior: float = 1.0) -> list[float]:
    """The maximum-likelihood strengths θ under which i beats j with probability sigmoid(θ_i - θ_j).

    Every item also has ``prior`` drawn games against an item of strength 0. So an item that always won has a finite
    strength, and one without a game has strength 0. Newton's method; the log-likelihood is concave.
    """
    won = torch.tensor(_points(games, count), dtype=torch.float64) + prior / 2
    met = torch.zeros(count, count, dtype=torch.float64)
    for game in games:
        met[game.first, game.second] += 1
        met[game.second, game.first] += 1
    strengths = torch.zeros(count, dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        beats, draws = torch.sigmoid(strengths[:, None] - strengths), torch.sigmoid(strengths)
        gradient = won - (met * beats).sum(1) - prior * draws
        coupled = met * beats * (1 - beats)
        curvature = torch.diag(coupled.sum(1) + prior * draws * (1 - draws)) - coupled
        step = torch.linalg.solve(curvature, gradient)
        strengths = strengths + step * min(1.0, _REACH / float(step.abs().max().clamp(min=1e-300)))
        if step.abs().max() < 1e-10:
            break
    return strengths.tolist()


def swiss_round(games: Sequence[Comparison], count: int) -> list[tuple[int, int]]:
    """Pairs for the next round of a Swiss tournament.

    Each item meets the item nearest in points that it has not met yet (a rematch if it has met all). With an odd number
    the last in points sits out; none sits out twice before every other has once.
    """
    points, played = _points(games, count), _play(games, count)
    met = {frozenset((game.first, game.second)) for game in games}
    waiting = sorted(range(count), key=lambda i: (-points[i], i))
    if count % 2:
        waiting.remove(max(waiting, key=lambda i: (played[i], waiting.index(i))))
    pairs = []
    while waiting:
        first = waiting.pop(0)
        second = next((opponent for opponent in waiting if frozenset((first, opponent)) not in met), waiting[0])
        waiting.remove(second)
        pairs.append((first, second))
    return pairs


def _points(games: Sequence[Comparison], count: int) -> list[float]:
    points = [0.0] * count
    for game in games:
        points[game.first] += game.won
        points[game.second] += 1.0 - game.won
    return points


def _play(games: Sequence[Comparison], count: int) -> list[int]:
    played = [0] * count
    for game in games:
        played[game.first] += 1
        played[game.second] += 1
    return played


Score = Literal["win_rate", "bradley_terry"]


class PairwiseComparisons:
    """Compares every sample of a group with every other: n (n - 1) / 2 comparisons.

    - ``by``: a function ``compare(first, second, *, …) -> float`` (plain or async) that returns the first sample's
      share of the win: 1.0, 0.5, 0.0, or a probability. Or a reward function, of which the higher value wins. A name,
      or a mapping with ``fn`` and its arguments.
    - ``score``: `win_rate`, the share of its comparisons that a sample won, in [0, 1]; or `bradley_terry`, strengths
      whose differences are log-odds of winning, shrunk towards 0 by ``prior`` draws.
    - ``both_orders`` makes each comparison twice, in both orders, and takes the mean, for judges that prefer a
      position. Otherwise the order alternates, so no sample always comes first.

    A failed comparison fails the whole group: the call is retried (`retries`), then the group's samples are dropped and
    counted. Raises ValueError for a group of one, and for a share outside of [0, 1].
    """

    def __init__(
        self,
        *,
        by: ComparisonFunction,
        score: Score = "win_rate",
        both_orders: bool = False,
        prior: PositiveFloat = 1.0,
    ) -> None:
        self._by, self._both = NestedFunction(by), both_orders
        self.start = self._by.start
        self._score = _score_function(score, prior)

    async def __call__(self, group: Sequence[Sample]) -> list[float]:
        pairs = list(combinations(range(_check_size(group)), 2))
        return self._score(await GroupComparisons(self._by, group, self._both).play(pairs), len(group))


class Tournament:
    """Compares the samples of a group in a Swiss tournament, with far fewer comparisons than PairwiseComparisons.

    ``rounds`` (default: log2 n, rounded up) times n / 2 comparisons, each of samples with about equal results so far,
    so most comparisons happen where the ranking is still open. The other arguments are those of PairwiseComparisons.
    `bradley_terry` is the default score, because it accounts for the strength of the opponents, which win rates do not.
    """

    def __init__(
        self,
        *,
        by: ComparisonFunction,
        rounds: PositiveInt | None = None,
        score: Score = "bradley_terry",
        both_orders: bool = False,
        prior: PositiveFloat = 1.0,
    ) -> None:
        self._by, self._both = NestedFunction(by), both_orders
        self.start = self._by.start
        self._score, self._rounds = _score_function(score, prior), rounds

    async def __call__(self, group: Sequence[Sample]) -> list[float]:
        match, games = GroupComparisons(self._by, group, self._both), []
        for _ in range(self._rounds or math.ceil(math.log2(_check_size(group)))):
            games += await match.play(swiss_round(games, len(group)))
        return self._score(games, len(group))


class GroupComparisons:
    """The comparisons of one group, of which those of a round run concurrently."""

    def __init__(self, by: NestedFunction, group: Sequence[Sample], both_orders: bool) -> None:
        self._by, self._group, self._both = by, group, both_orders
        self._values: list[float] = []

    async def play(self, pairs: Sequence[tuple[int, int]]) -> list[Comparison]:
        if self._by.arity == 1:
            return await self._compare_values(pairs)
        ordered = [(i, j) if (i + j) % 2 else (j, i) for i, j in pairs]
        games = await self._compare(ordered)
        if not self._both:
            return games
        exchanged = await self._compare([(j, i) for i, j in ordered])
        return [
            Comparison(i, j, (won + 1.0 - lost) / 2) for (i, j, won), (_, _, lost) in zip(games, exchanged, strict=True)
        ]

    async def _compare(self, pairs: Sequence[tuple[int, int]]) -> list[Comparison]:
        shares = await self._by([(self._group[first], self._group[second]) for first, second in pairs])
        for share in shares:
            if not 0.0 <= share <= 1.0:
                raise ValueError(
                    f"'{self._by.name}' returned {share:g}; expected the first one's share of the win, from 0 to 1"
                )
        return [Comparison(*pair, share) for pair, share in zip(pairs, shares, strict=True)]

    async def _compare_values(self, pairs: Sequence[tuple[int, int]]) -> list[Comparison]:
        self._values = self._values or await self._by([(sample,) for sample in self._group])
        values = self._values
        return [Comparison(i, j, 0.5 * (1 + (values[i] > values[j]) - (values[i] < values[j]))) for i, j in pairs]


def _score_function(score: Score, prior: float) -> Callable[[Sequence[Comparison], int], list[float]]:
    if score == "win_rate":
        return win_rates
    return lambda games, count: bradley_terry(games, count, prior)


def _check_size(group: Sequence[Sample]) -> int:
    if len(group) < 2:
        raise ValueError("a group of one sample has nothing to compare; set runtime.samples_per_prompt to 2 or more")
    return len(group)
