"""From comparisons of some items with one another to a value for each, and who meets whom next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

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
