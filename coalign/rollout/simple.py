"""Environments of plain conversation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from coalign.config.functions import resolve
from coalign.rollout.episode import Episode
from coalign.rollout.threads import in_thread


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
    reply = resolve(user, "coalign.rollout.users")
    for turns_left in reversed(range(max_turns)):
        turn = await episode.generate(max_new_tokens=tokens_per_turn)
        if not turns_left or not turn.tokens:
            return
        said = await call(reply, list(episode.messages), episode.row, episode.random)
        if said is None:
            return
        episode.say({"role": "user", "content": said})


def _check_user(samples: Mapping[str, int], *, user: str, **_: Any) -> None:
    resolve(user, "coalign.rollout.users")


simulated_user.check = _check_user


async def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """What a plain or async function returns; a plain one runs in a thread, so it may take its time."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments, **keywords)
    return await in_thread(function, *arguments, **keywords)
