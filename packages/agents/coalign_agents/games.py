"""Games, and the environments that play them: against an opponent, against a simulator, or the policy against itself.

The game classes are only rules; they know nothing of policies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from coalign.config.functions import bind, resolve
from coalign.environments.episode import Episode
from coalign_agents.calls import call_function


class _IllegalMove(ValueError):
    """A move that the rules do not allow; the message says why."""


class Game(Protocol):
    """A game of ``players`` (1 or 2), who are numbered from 0. Created by ``rules(random, **settings)``."""

    players: int

    @property
    def turn(self) -> int | None:
        """The player to move; None when the game is over."""
        ...

    def introduction(self, player: int) -> str:
        """The rules and the position, for a player's first move."""
        ...

    def view(self, player: int) -> str:
        """The moves since the player's last one, and the position."""
        ...

    def moves(self) -> list[str]:
        """The legal moves of the player to move."""
        ...

    def play(self, move: str) -> None:
        """Make a move. _IllegalMove if the rules do not allow it."""
        ...

    def score(self, player: int) -> float:
        """The outcome's value for a player once the game is over: 1 for a win, -1 for a loss, for example."""
        ...


class Nim:
    """One heap; each move takes 1 to ``most`` sticks, and the player who takes the last one wins.

    From a heap of a multiple of ``most`` + 1 the second player can force a win, otherwise the first.
    """

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
        last_move = "" if self.last is None else f"I take {self.last}. "
        return f"{last_move}There are {self.left} sticks. Your move."

    def moves(self) -> list[str]:
        return [str(count) for count in range(1, min(self.most, self.left) + 1)]

    def play(self, move: str) -> None:
        if move not in self.moves():
            raise _IllegalMove(f"you may take {' or '.join(self.moves())}, not {move[:20]!r}")
        self.last = int(move)
        self.left -= self.last
        self._next = 1 - self._next

    def score(self, player: int) -> float:
        return -1.0 if self._next == player else 1.0  # the player who would be next has lost


class GuessTheNumber:
    """Find a number from 1 to ``highest`` in ``tries`` guesses; each answer says higher or lower."""

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
            raise _IllegalMove(f"a guess is a number from 1 to {self.highest}, not {move[:20]!r}")
        self.last = int(move)
        self.tries -= 1

    def score(self, player: int) -> float:
        return 1.0 if self.last == self.number else 0.0


_MOVE = re.compile(r"<move>(.*?)</move>", re.DOTALL)


async def game(
    episode: Episode,
    *,
    rules: str = "Nim",
    settings: dict[str, Any] = {},  # noqa: B006  (never changed)
    opponent: str = "random_mover",
    starts: bool | None = None,
    illegal: float = -1.0,
    tries: int = 1,
) -> None:
    """Play one game against ``opponent``, a plain or async function (game, random) that returns a move.

    rules: a class of this module or a dotted path; `settings` are its keyword arguments. starts: whether the policy
    moves first (None: drawn at random, the same for a whole group). The outcome is the reward. A policy that makes no
    legal move in ``tries`` attempts, or runs out of tokens, has lost and gets ``illegal``.
    """
    board = _new_game(rules, settings, episode)
    find_move = resolve(opponent, "coalign_agents.games")
    same_in_group = Random(f"{episode.seed}/{episode.group}/starts")
    policy_player = 0 if board.players == 1 or (same_in_group.random() < 0.5 if starts is None else starts) else 1
    player = _Player(episode, policy_player, tries)
    while (turn := board.turn) is not None:
        if turn != policy_player:
            board.play(await call_function(find_move, board, episode.random))
        elif not await player.move(board):
            episode.reward(illegal)
            return
    episode.reward(board.score(policy_player))


async def self_play(
    group: list[Episode],
    *,
    rules: str = "Nim",
    settings: dict[str, Any] = {},  # noqa: B006  (never changed)
    illegal: float = -1.0,
    tries: int = 1,
) -> None:
    """The policy plays itself: samples 0 and 1 of a prompt play each other, 2 and 3, and so on; both sides are trained.

    A player that makes no legal move in ``tries`` attempts has lost (``illegal``), and the other has won (1). A player
    without a turn before the game is over gets no reward. All games of a group start from the same position. Needs an
    even `runtime.samples_per_prompt` and `runtime.eval_samples`.
    """
    _check_even({f"the number of samples of group {group[0].group}": len(group)})
    pairs = [
        (_Player(first, 0, tries), _Player(second, 1, tries))
        for first, second in zip(group[::2], group[1::2], strict=True)
    ]
    await asyncio.gather(*(_play_match(_new_game(rules, settings, group[0]), pair, illegal) for pair in pairs))


async def _play_match(board: Game, players: Sequence[_Player], illegal: float) -> None:
    while (turn := board.turn) is not None:
        if not await players[turn].move(board):
            players[turn].episode.reward(illegal)
            players[1 - turn].reward(1.0)
            return
    for player in players:
        player.reward(board.score(player.number))


def random_mover(board: Game, random: Random) -> str:
    """Any legal move."""
    return random.choice(board.moves())


class _Player:
    """A policy as a player."""

    def __init__(self, episode: Episode, number: int, tries: int) -> None:
        self.episode = episode
        self.number = number
        self.tries = tries
        self.moved = False

    async def move(self, board: Game) -> bool:
        """Have the policy move; return whether it made a legal move."""
        if self.moved:
            self._tell(board.view(self.number))
        else:
            self.episode.begin([{"role": "user", "content": board.introduction(self.number)}])
        self.moved = True
        for tries_left in reversed(range(self.tries)):
            turn = await self.episode.generate()
            written = _MOVE.findall(turn.text)
            try:
                board.play(written[-1].strip() if written else "")
                return True
            except _IllegalMove as error:
                self.episode.count("illegal_moves")
                if not turn.tokens or not tries_left:
                    return False
                self._tell(f"That is not possible: {error}.")
        return False

    def reward(self, value: float) -> None:
        """Reward the player; nothing for one that has never moved."""
        if self.moved:
            self.episode.reward(value)

    def _tell(self, text: str) -> None:
        self.episode.say({"role": "user", "content": text})


def _new_game(rules: str, settings: Mapping[str, Any], episode: Episode) -> Game:
    """A new game, with the same starting position for all samples of a group."""
    return _find_rules(rules, settings)(Random(f"{episode.seed}/{episode.group}"))


def _find_rules(name: str, settings: Mapping[str, Any]) -> Callable[[Random], Game]:
    cls = resolve(name, "coalign_agents.games")
    return partial(cls, **bind(cls, settings, "rollout.settings"))


def _check_even(samples: Mapping[str, int]) -> None:
    for key, count in samples.items():
        if count % 2:
            raise ValueError(f"{key} is {count}: `self_play` pairs the samples of a prompt; make it even")


def _check_game(
    samples: Mapping[str, int], *, rules: str, settings: Mapping[str, Any], opponent: str, **_: Any
) -> None:
    _find_rules(rules, settings)
    resolve(opponent, "coalign_agents.games")


def _check_self_play(samples: Mapping[str, int], *, rules: str, settings: Mapping[str, Any], **_: Any) -> None:
    if (players := _find_rules(rules, settings)(Random(0)).players) != 2:
        raise ValueError(
            f"rollout.rules: `{rules}` is a game for {players} player, and `self_play` needs 2; use `game`"
        )
    _check_even(samples)


game.check = _check_game
self_play.check = _check_self_play
