"""Environments of plain conversation, and the lookup of the environment that a configuration names."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any

from coalign.config.errors import located_at
from coalign.config.functions import bind, resolve
from coalign.config.schema import RolloutConfig
from coalign.environments.episode import Episode
from coalign.environments.loop import EnvironmentFunction, Environments
from coalign.processes.function_process import is_coroutine_function, share_pool
from coalign.threads import CallTimeout, call_in_thread

_DAY = 86400.0  # seconds: the episode's clock cancels what takes too long


def scripted(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], random: Random) -> str | None:
    """The user's next message from the row's list ``replies``. ValueError for a row without it."""
    answers = sum(message["role"] == "assistant" for message in messages)
    given = sum(message["role"] == "assistant" for message in row.get("messages") or [])  # the episode
    if (replies := row.get("replies")) is None:
        raise ValueError(f"the row has no list `replies` of what the user says; it has {', '.join(sorted(row))}")
    position = answers - given - 1
    return replies[position] if position < len(replies) else None


async def single_turn(episode: Episode) -> None:
    """A prompt and its response. Policies generate these without an episode: just as fast, and the same tokens."""
    await episode.generate()


async def simulated_user(
    episode: Episode, *, user: str, max_turns: int = 4, tokens_per_turn: int | None = None
) -> None:
    """A conversation of at most ``max_turns`` turns with a function that plays the user.

    ``user(messages, row, random)`` (a dotted path; plain or async) returns the user's next message, or None to end the
    conversation. ``random`` is the episode's generator. The function is called again after a ServiceError.
    """
    reply = resolve(user, "coalign.environments.conversation")
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
    resolve(user, "coalign.environments.conversation")


simulated_user.check = _check_user


async def call_function(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a plain or async function; a plain one runs in a thread, so it may block."""
    if is_coroutine_function(function):
        return await function(*arguments, **keywords)
    return await call_in_thread(function, *arguments, **keywords)


async def call_isolated(
    path: str, function: Any, arguments: Sequence[Any], settings: Mapping[str, Any] | None = None, seconds: float = _DAY
) -> Any:
    """Call the function that a configuration names ``path`` with data, no live objects; ``settings`` are keywords.

    A user's plain function runs in child processes, which may hang or die. Raises what the function raises,
    CallTimeout after ``seconds``, and ProcessDied.
    """
    settings = settings or {}
    if not is_coroutine_function(function) and (pool := share_pool(path, function, settings)):
        return await pool.call(arguments, seconds)
    return await limit_time(call_function(function, *arguments, **settings), seconds)


async def limit_time(call: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Await a call; CallTimeout, which is no TimeoutError of the function's own, after ``seconds``."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if limit.expired():
            raise CallTimeout(seconds) from None
        raise


def find_environments(config: RolloutConfig) -> Environments:
    """The environments that `rollout` names; none for `single_turn` alone, which policies do without an episode.

    Raises ConfigError for wrong arguments, ValueError for an unknown function, TypeError for a function that is not an
    environment.
    """
    environments = {}
    for key, section in (config.environments or {"": config}).items():
        path = ("rollout", "environments", key) if key else ("rollout",)
        with located_at(*path, "fn"):
            fn = resolve(section.fn, config.home)
            arguments = bind(fn, section.arguments, ".".join(path))
            if fn is single_turn and not key:
                return {}
            environments[key] = EnvironmentFunction(fn, arguments, section.timeout or config.timeout, key)
    return environments
