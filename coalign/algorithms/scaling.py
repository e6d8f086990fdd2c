"""Mean and variance of everything that a run has seen, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moments:
    """``count`` values, their ``mean`` and the sum of their squared deviations from it; they add up exactly."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Of the population; 0 of nothing."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def __add__(self, other: Moments) -> Moments:
        """Of both together, without a difference of large numbers (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        if not count:
            return self
        apart, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + apart * apart * self.count * share
        return Moments(count, self.mean + apart * share, squares)
