"""Environments of games: against an opponent, alone against a simulator, or the policy against itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from coalign.config.functions import bind, resolve
from coalign.rollout.episode import Episode
from coalign.rollout.games import Game, IllegalMove
from coalign.rollout.simple import call

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
    """One game against ``opponent``, a function (game, random) that returns a move: plain or async.

    rules: a class of coalign.rollout.games or a dotted path to one (`settings` are its keyword arguments). starts:
    whether the policy has the first move (None: by chance, the same within a group). The outcome is the reward. A
    policy that makes no legal move in ``tries`` attempts, or runs out of tokens, has lost: ``illegal``.
    """
    board = _board(rules, settings, episode)
    answer = resolve(opponent, "coalign.rollout.playing")
    same_in_group = Random(f"{episode.seed}/{episode.group}/starts")
    me = 0 if board.players == 1 or (same_in_group.random() < 0.5 if starts is None else starts) else 1
    player = _Player(episode, me, tries)
    while (turn := board.turn) is not None:
        if turn != me:
            board.play(await call(answer, board, episode.random))
        elif not await player.move(board):
            episode.reward(illegal)
            return
    episode.reward(board.score(me))


async def self_play(
    group: list[Episode],
    *,
    rules: str = "Nim",
    settings: dict[str, Any] = {},  # noqa: B006  (never changed)
    illegal: float = -1.0,
    tries: int = 1,
) -> None:
    """The policy against itself: samples 0 and 1 of a prompt play each other, 2 and 3, …; both sides are trained, but
    for one who has had no turn before the game was over.

    Who makes no legal move in ``tries`` attempts has lost (``illegal``), and the other one has won (1). The samples of
    a group start from the same position. Needs an even `runtime.samples_per_prompt`, and `runtime.eval_samples`.
    """
    _pair_up({f"the number of samples of group {group[0].group}": len(group)})
    sides = [
        (_Player(first, 0, tries), _Player(second, 1, tries))
        for first, second in zip(group[::2], group[1::2], strict=True)
    ]
    await asyncio.gather(*(_match(_board(rules, settings, group[0]), pair, illegal) for pair in sides))


async def _match(board: Game, players: Sequence[_Player], illegal: float) -> None:
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
    """A policy at the board."""

    def __init__(self, episode: Episode, number: int, tries: int) -> None:
        self.episode = episode
        self.number = number
        self.tries = tries
        self.moved = False

    async def move(self, board: Game) -> bool:
        """Let the policy move; whether it did."""
        if self.moved:
            self._tell(board.view(self.number))
        else:
            self.episode.begin([{"role": "user", "content": board.introduction(self.number)}])
        self.moved = True
        for tries_left in reversed(range(self.tries)):
            turn = await self.episode.generate()
            said = _MOVE.findall(turn.text)
            try:
                board.play(said[-1].strip() if said else "")
                return True
            except IllegalMove as error:
                self.episode.count("illegal_moves")
                if not turn.tokens or not tries_left:
                    return False
                self._tell(f"That is not possible: {error}.")
        return False

    def reward(self, value: float) -> None:
        """What the outcome is worth; nothing for one who has never moved."""
        if self.moved:
            self.episode.reward(value)

    def _tell(self, text: str) -> None:
        self.episode.say({"role": "user", "content": text})


def _board(rules: str, settings: Mapping[str, Any], episode: Episode) -> Game:
    """The same starting position for all samples of a group, as baselines compare them."""
    return _rules(rules, settings)(Random(f"{episode.seed}/{episode.group}"))


def _rules(name: str, settings: Mapping[str, Any]) -> Callable[[Random], Game]:
    make = resolve(name, "coalign.rollout.games")
    return partial(make, **bind(make, settings, "rollout.settings"))


def _pair_up(samples: Mapping[str, int]) -> None:
    for key, count in samples.items():
        if count % 2:
            raise ValueError(f"{key} is {count}: `self_play` pairs the samples of a prompt; make it even")


def _check_game(
    samples: Mapping[str, int], *, rules: str, settings: Mapping[str, Any], opponent: str, **_: Any
) -> None:
    _rules(rules, settings)
    resolve(opponent, "coalign.rollout.playing")


def _check_self_play(samples: Mapping[str, int], *, rules: str, settings: Mapping[str, Any], **_: Any) -> None:
    if (players := _rules(rules, settings)(Random(0)).players) != 2:
        raise ValueError(
            f"rollout.rules: `{rules}` is a game for {players} player, and `self_play` needs 2; use `game`"
        )
    _pair_up(samples)


game.check = _check_game
self_play.check = _check_self_play
