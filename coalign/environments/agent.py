"""The environment that runs a user's agent, written against OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from coalign.config.functions import bind, resolve
from coalign.environments.chat import ChatClient, ChatCompletion, ChatResource, serve_chat
from coalign.environments.conversation import call_function
from coalign.environments.episode import Episode


async def agent(
    episode: Episode,
    *,
    run: str,
    arguments: dict[str, Any] = {},  # noqa: B006  (never changed)
    parser: str = "hermes",
    serve_http: bool = False,
) -> None:
    """Run a user's function ``run(client, row, **arguments)`` with the policy behind ``client``.

    ``run`` is the dotted path of a plain or async function. ``client.chat.completions.create(messages=…, tools=…)``
    answers like OpenAI's client (to be awaited in an async function). With ``serve_http`` the function gets the address
    of an HTTP endpoint instead, for its own clients (``base_url``) or for other programs. Every request must continue
    the conversation: see coalign.environments.chat. A number that the function returns is the reward. ``parser`` is the
    format of the model's tool calls.
    """
    fn = resolve(run, "coalign.environments.agent")
    settings = bind(fn, arguments, "rollout.arguments")
    client = ChatClient(episode, resolve(parser, "coalign.environments.parsers"))
    if serve_http:
        async with serve_chat(client.chat.completions) as address:
            value = await call_function(fn, address, episode.row, **settings)
    else:
        suited = client if inspect.iscoroutinefunction(fn) else BlockingChatClient(client)
        value = await call_function(fn, suited, episode.row, **settings)
    if value is not None:
        episode.reward(value)


def _check(samples: Mapping[str, int], *, run: str, arguments: Mapping[str, Any], parser: str, **_: Any) -> None:
    bind(resolve(run, "coalign.environments.agent"), arguments, "rollout.arguments")
    resolve(parser, "coalign.environments.parsers")


agent.check = _check


class BlockingChatClient:
    """The client for a plain function in a thread: ``create`` returns the answer itself."""

    def __init__(self, client: ChatClient) -> None:
        self.chat = ChatResource(_BlockingCompletions(client, asyncio.get_running_loop()))


class _BlockingCompletions:
    def __init__(self, client: ChatClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def create(self, **request: Any) -> ChatCompletion:
        answer = self._client.chat.completions.create(**request)
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()
