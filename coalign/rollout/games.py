"""Games as rules: what may be done, who is next, who has won. They know nothing of policies."""

from __future__ import annotations

from random import Random
from typing import Protocol


class IllegalMove(ValueError):
    """A move that the rules do not allow; the message says why."""


class Game(Protocol):
    """A game of ``players`` (1 or 2), who are numbered from 0. Built by ``rules(random, **settings)``."""

    players: int

    @property
    def turn(self) -> int | None:
        """Whose move it is; None when the game is over."""
        ...

    def introduction(self, player: int) -> str:
        """The rules and the position, for one who is about to make the first move of theirs."""
        ...

    def view(self, player: int) -> str:
        """What has happened since the player's last move, and the position."""
        ...

    def moves(self) -> list[str]:
        """What the one who is next may do."""
        ...

    def play(self, move: str) -> None:
        """IllegalMove if the rules do not allow it."""
        ...

    def score(self, player: int) -> float:
        """What the outcome is worth to a player, once the game is over: 1 for a win, -1 for a loss, say."""
        ...


class Nim:
    """One heap; each move takes 1 to ``most`` sticks; who takes the last one wins. With a heap of a multiple of
    ``most`` + 1 the second player can force a win, otherwise the first."""

    players = 2

    def __init__(self, random: Random, *, sticks: int | None = None, most: int = 3) -> None:
        self.left = random.randint(7, 21) if sticks is None else sticks
        self.most = most
        self.last: int | None = None
        self._next = 0

    @property
    def turn(self) -> int | None:
        return self._next if self.left else None

    def introduction(self, player: int) -> str:
        rules = (
            f"We play Nim: in turn, each of us takes 1 to {self.most} sticks, and whoever takes the last one wins. "
            "Write your move as <move>number</move>."
        )
        return f"{rules} {self.view(player)}"

    def view(self, player: int) -> str:
        before = "" if self.last is None else f"I take {self.last}. "
        return f"{before}There are {self.left} sticks. Your move."

    def moves(self) -> list[str]:
        return [str(count) for count in range(1, min(self.most, self.left) + 1)]

    def play(self, move: str) -> None:
        if move not in self.moves():
            raise IllegalMove(f"you may take {' or '.join(self.moves())}, not {move[:20]!r}")
        self.last = int(move)
        self.left -= self.last
        self._next = 1 - self._next

    def score(self, player: int) -> float:
        return -1.0 if self._next == player else 1.0  # who would be next has lost


class GuessTheNumber:
    """A number from 1 to ``highest`` is to be found in ``tries`` guesses; each answer says higher or lower."""

    players = 1

    def __init__(self, random: Random, *, highest: int = 100, tries: int = 7) -> None:
        self.number = random.randint(1, highest)
        self.highest = highest
        self.tries = tries
        self.last: int | None = None

    @property
    def turn(self) -> int | None:
        return 0 if self.tries and self.last != self.number else None

    def introduction(self, player: int) -> str:
        return (
            f"I think of a number from 1 to {self.highest}. You have {self.tries} guesses, and I say whether it is "
            "higher or lower. Write each guess as <move>number</move>."
        )

    def view(self, player: int) -> str:
        direction = "higher" if self.number > (self.last or 0) else "lower"
        return f"It is {direction} than {self.last}. You have {self.tries} guesses left."

    def moves(self) -> list[str]:
        return [str(number) for number in range(1, self.highest + 1)]

    def play(self, move: str) -> None:
        if move not in self.moves():
            raise IllegalMove(f"a guess is a number from 1 to {self.highest}, not {move[:20]!r}")
        self.last = int(move)
        self.tries -= 1

    def score(self, player: int) -> float:
        return 1.0 if self.last == self.number else 0.0
