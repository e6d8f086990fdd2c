"""The environment for conversations with a user, whom a function plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from coalign.config.functions import resolve
from coalign.environments.episode import Episode
from coalign_agents.calls import call_isolated


def scripted(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], random: Random) -> str | None:
    """The user's next message from the row's list ``replies``. ValueError for a row without it."""
    answers = sum(message["role"] == "assistant" for message in messages)
    given = sum(message["role"] == "assistant" for message in row.get("messages") or [])  # the episode
    if (replies := row.get("replies")) is None:
        raise ValueError(f"the row has no list `replies` of what the user says; it has {', '.join(sorted(row))}")
    position = answers - given - 1
    return replies[position] if position < len(replies) else None


async def simulated_user(
    episode: Episode, *, user: str, max_turns: int = 4, tokens_per_turn: int | None = None
) -> None:
    """A conversation of at most ``max_turns`` turns with a function that plays the user.

    ``user(messages, row, random)`` (a dotted path; plain or async) returns the user's next message, or None to end the
    conversation. ``random`` is the episode's generator. The function is called again after a ServiceError.
    """
    reply = resolve(user, "coalign_agents.users")
    for turns_left in reversed(range(max_turns)):
        turn = await episode.generate(max_new_tokens=tokens_per_turn)
        if not turns_left or not turn.tokens:
            return
        message = await episode.call_service(
            lambda: call_isolated(user, reply, [list(episode.messages), dict(episode.row), episode.random])
        )
        if message is None:
            return
        episode.say({"role": "user", "content": message})


def _check_user(samples: Mapping[str, int], *, user: str, **_: Any) -> None:
    resolve(user, "coalign_agents.users")


simulated_user.check = _check_user
