"""Rewards from comparisons within a group: the responses to a prompt are ranked against one another.

From comparisons of some items with one another to a value for each, and who meets whom next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt

from coalign.rewards.nested import ComparisonFunction, NestedFunction
from coalign.types import Sample

_STEPS = 10_000  # far more than any group needs
# The curvature changes by a factor of at most exp(|Δ(θ_i - θ_j)|), so a Newton step of up to this always goes uphill.
_REACH = 0.3


class Comparison(NamedTuple):
    """A comparison of two items by their numbers. ``won`` is the first one's share of the win: 1, 0.5 for a draw, 0, or
    a probability between."""

    first: int
    second: int
    won: float


def win_rates(games: Sequence[Comparison], count: int) -> list[float]:
    """The share of its games that each item won, draws by half; 0.5 for one without a game."""
    won, played = _points(games, count), _played(games, count)
    return [won[i] / played[i] if played[i] else 0.5 for i in range(count)]


def bradley_terry(games: Sequence[Comparison], count: int, prior: float = 1.0) -> list[float]:
    """The strengths θ under which i beats j with probability sigmoid(θ_i - θ_j), as the games make most likely.

    Every item has also drawn ``prior`` games against one of strength 0, so one that always won has a finite strength
    and one without a game has 0. By Newton's method; the log-likelihood is concave.
    """
    won = torch.tensor(_points(games, count), dtype=torch.float64) + prior / 2
    met = torch.zeros(count, count, dtype=torch.float64)
    for game in games:
        met[game.first, game.second] += 1
        met[game.second, game.first] += 1
    strengths = torch.zeros(count, dtype=torch.float64)
    for _ in range(_STEPS):
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
    """Pairs for the next round of a Swiss tournament: each item with the one nearest in points that it has not met (a
    rematch if it has met all). Of an odd number the last in points sits out, each at most once before another does."""
    points, played = _points(games, count), _played(games, count)
    met = {frozenset((game.first, game.second)) for game in games}
    waiting = sorted(range(count), key=lambda i: (-points[i], i))
    if count % 2:
        waiting.remove(max(waiting, key=lambda i: (played[i], waiting.index(i))))
    pairs = []
    while waiting:
        first = waiting.pop(0)
        second = next((other for other in waiting if frozenset((first, other)) not in met), waiting[0])
        waiting.remove(second)
        pairs.append((first, second))
    return pairs


def _points(games: Sequence[Comparison], count: int) -> list[float]:
    points = [0.0] * count
    for game in games:
        points[game.first] += game.won
        points[game.second] += 1.0 - game.won
    return points


def _played(games: Sequence[Comparison], count: int) -> list[int]:
    played = [0] * count
    for game in games:
        played[game.first] += 1
        played[game.second] += 1
    return played


Score = Literal["win_rate", "bradley_terry"]


class Pairwise:
    """Every sample is compared with every other one of its group: n (n - 1) / 2 comparisons.

    - ``by``: the name of a function ``compare(first, second, *, …) -> float`` (the first one's share of the win: 1.0,
      0.5, 0.0, or a probability between; plain or async), or of a reward function, of whose values the higher wins; or
      a mapping with ``fn`` and its arguments.
    - ``score``: `win_rate`, the share of its comparisons that a sample won, in [0, 1]; or `bradley_terry`, strengths
      whose differences are log-odds of winning, shrunk towards 0 by ``prior`` draws.
    - ``both_orders`` asks twice, with the two exchanged, and takes the mean, for a judge that favours a place. Without
      it the places take turns, so that no sample always comes first.

    A comparison that fails fails the group, as every reward function that does: it is repeated (`retries`), then its
    samples are dropped and counted. Raises ValueError for a group of one, and for a share outside of [0, 1].
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
        self._score = _scoring(score, prior)

    async def __call__(self, group: Sequence[Sample]) -> list[float]:
        pairs = list(combinations(range(_size(group)), 2))
        return self._score(await GroupComparisons(self._by, group, self._both).play(pairs), len(group))


class Tournament:
    """The samples of a group meet in a Swiss tournament: ``rounds`` (none given: log2 n, rounded up) times n / 2
    comparisons, each of samples that have done about equally well so far; the other keys as in Pairwise.

    Far fewer comparisons than all pairs, and most of them where the ranking is still open. Strengths take into account
    whom a sample has met (win rates do not), so `bradley_terry` is the default here.
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
        self._score, self._rounds = _scoring(score, prior), rounds

    async def __call__(self, group: Sequence[Sample]) -> list[float]:
        match, games = GroupComparisons(self._by, group, self._both), []
        for _ in range(self._rounds or math.ceil(math.log2(_size(group)))):
            games += await match.play(swiss_round(games, len(group)))
        return self._score(games, len(group))


class GroupComparisons:
    """The games of one group; those of a call at the same time."""

    def __init__(self, by: NestedFunction, group: Sequence[Sample], both_orders: bool) -> None:
        self._by, self._group, self._both = by, group, both_orders
        self._values: list[float] = []

    async def play(self, pairs: Sequence[tuple[int, int]]) -> list[Comparison]:
        if self._by.arity == 1:
            return await self._by_value(pairs)
        seats = [pair if sum(pair) % 2 else pair[::-1] for pair in pairs]
        games = await self._compared(seats)
        if not self._both:
            return games
        exchanged = await self._compared([seat[::-1] for seat in seats])
        return [
            Comparison(i, j, (won + 1.0 - lost) / 2) for (i, j, won), (_, _, lost) in zip(games, exchanged, strict=True)
        ]

    async def _compared(self, seats: Sequence[tuple[int, int]]) -> list[Comparison]:
        shares = await self._by([(self._group[first], self._group[second]) for first, second in seats])
        for share in shares:
            if not 0.0 <= share <= 1.0:
                raise ValueError(
                    f"'{self._by.name}' returned {share:g}; expected the first one's share of the win, from 0 to 1"
                )
        return [Comparison(*seat, share) for seat, share in zip(seats, shares, strict=True)]

    async def _by_value(self, pairs: Sequence[tuple[int, int]]) -> list[Comparison]:
        self._values = self._values or await self._by([(sample,) for sample in self._group])
        values = self._values
        return [Comparison(i, j, 0.5 * (1 + (values[i] > values[j]) - (values[i] < values[j]))) for i, j in pairs]


def _scoring(score: Score, prior: float) -> Callable[[Sequence[Comparison], int], list[float]]:
    if score == "win_rate":
        return win_rates
    return lambda games, count: bradley_terry(games, count, prior)


def _size(group: Sequence[Sample]) -> int:
    if len(group) < 2:
        raise ValueError("a group of one sample has nothing to compare; set runtime.samples_per_prompt to 2 or more")
    return len(group)
