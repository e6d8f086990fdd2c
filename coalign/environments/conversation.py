"""Who may play the user in `simulated_user`.

Environments of plain conversation.

The environment that a configuration names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from coalign.config.functions import bind, resolve
from coalign.config.schema import RolloutConfig
from coalign.environments.episode import Episode, call_in_thread
from coalign.environments.loop import EnvironmentFunction


def scripted(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], random: Random) -> str | None:
    """What the row's list ``replies`` says, one after the other. ValueError for a row without it."""
    said = sum(message["role"] == "assistant" for message in messages) - 1
    asked = sum(message["role"] == "assistant" for message in row.get("messages") or [])  # before the episode
    if (replies := row.get("replies")) is None:
        raise ValueError(f"the row has no list `replies` of what the user says; it has {', '.join(sorted(row))}")
    return replies[said - asked] if said - asked < len(replies) else None


async def single_turn(episode: Episode) -> None:
    """A prompt and its response. Policies generate these without an episode: as fast, token by token the same."""
    await episode.generate()


async def simulated_user(
    episode: Episode, *, user: str, max_turns: int = 4, tokens_per_turn: int | None = None
) -> None:
    """A conversation with a function that plays the user, of at most ``max_turns`` turns of the policy.

    ``user(messages, row, random)`` (a dotted path; plain or async) returns what the user says next, or None when there
    is nothing more to say. ``random`` is the episode's own generator.
    """
    reply = resolve(user, "coalign.environments.conversation")
    for turns_left in reversed(range(max_turns)):
        turn = await episode.generate(max_new_tokens=tokens_per_turn)
        if not turns_left or not turn.tokens:
            return
        said = await call_function(reply, list(episode.messages), episode.row, episode.random)
        if said is None:
            return
        episode.say({"role": "user", "content": said})


def _check_user(samples: Mapping[str, int], *, user: str, **_: Any) -> None:
    resolve(user, "coalign.environments.conversation")


simulated_user.check = _check_user


async def call_function(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """What a plain or async function returns; a plain one runs in a thread, so it may take its time."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments, **keywords)
    return await call_in_thread(function, *arguments, **keywords)


def find_environment(config: RolloutConfig) -> EnvironmentFunction | None:
    """What `rollout` asks for; None for `single_turn`, which policies do by themselves.

    Raises ConfigError for wrong arguments, ValueError where there is no such function, TypeError for a function that is
    no environment.
    """
    fn = resolve(config.fn, "coalign.environments")
    arguments = bind(fn, config.arguments, "rollout")
    if fn is single_turn:
        return None
    return EnvironmentFunction(fn, arguments, config.timeout)
