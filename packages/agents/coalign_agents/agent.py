"""An episode behind the interface of OpenAI's chat completions, and the environment for agents that use it.

An agent may ask whatever it likes (coalign.environments.tree): the policy's earlier turns keep the tokens that were
sampled. The same interface is served over HTTP on this machine, for one episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from coalign.config.functions import bind, resolve
from coalign.data.messages import parse_messages
from coalign.environments.conversation import call_function
from coalign.environments.episode import Episode, Turn
from coalign_serve.serving.completion_records import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Parser,
    TokenUsage,
    describe_error,
    find_finish_reason,
    read_answer,
    read_message,
)


class _ChatCompletions:
    """Answers requests for completions, whatever they repeat. ``parser``: the format of the model's tool calls."""

    def __init__(self, episode: Episode, parser: Parser) -> None:
        self.episode = episode
        self.parser = parser

    async def create(
        self,
        *,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        model: str = "policy",
        n: int = 1,
        stream: bool = False,
        **sampling: Any,
    ) -> ChatCompletion:
        """Return ``n`` answers of the policy to ``messages``.

        Messages that repeat an earlier answer go on behind its tokens. Others begin another row of the episode: a
        summary of the history, a sub-agent, other tools. The run decides how tokens are sampled: ``temperature``,
        ``top_p``, ``seed`` and the like have no effect. ValueError for streams.
        """
        if stream:
            raise ValueError("a training episode gives whole answers (stream=False)")
        sent = [read_message(message) for message in messages]
        shown = [dict(tool) for tool in tools] if tools else None
        options: dict[str, Any] = {
            "max_new_tokens": max_completion_tokens or max_tokens,
            "stop": (stop,) if isinstance(stop, str) else stop,
        }
        turns = await asyncio.gather(*(self.episode.ask(sent, shown, **options) for _ in range(n)))
        answers = [self._to_message(turn, sent, shown) for turn in turns]
        sampled = sum(len(turn.tokens) for turn in turns)
        read = len(turns[0].path_tokens) - len(turns[0].tokens)
        return ChatCompletion(
            id=f"{self.episode.group}-{self.episode.index}-{len(self.episode.tree.turns)}",
            model=model,
            choices=[
                ChatChoice(index=i, message=answer, finish_reason=find_finish_reason(turn.status, answer))
                for i, (turn, answer) in enumerate(zip(turns, answers, strict=True))
            ],
            usage=TokenUsage(prompt_tokens=read, completion_tokens=sampled, total_tokens=read + sampled),
        )

    def _to_message(self, turn: Turn, sent: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> ChatMessage:
        """Convert a turn to a message. If a tool call cannot be read, the turn stays text; the failure is counted."""
        message, unreadable = read_answer(turn, self.parser, f"call_{turn.number}")
        if unreadable:
            self.episode.count("tool_failed/bad_json", unreadable)
        conversation = parse_messages([*sent, message.model_dump(exclude_none=True)], "messages")
        self.episode.tree.remember(turn, tools, conversation)
        return message


_MAX_REQUEST_BYTES = 64 * 2**20
_CLIENT_TIMEOUT, _MAX_CONNECTIONS = 60.0, 64  # timeout in seconds


@contextlib.asynccontextmanager
async def _serve_chat(completions: _ChatCompletions) -> AsyncIterator[str]:
    """Serve POST <address>/chat/completions to this machine within this context.

    The address ends in /v1 and holds a key, since every user and program of the machine reaches its port.
    """
    from coalign.http_server import HttpRefusal, Request, build_application, read_body
    from coalign_serve.serving.listener import serve_within

    key = secrets.token_urlsafe(32)

    async def answer(request: Request) -> dict[str, Any]:
        if not secrets.compare_digest(request.path_params["key"].encode(), key.encode()):
            raise HttpRefusal(HTTPStatus.UNAUTHORIZED, "this is not the address that the agent was given")
        body = await read_body(request, _MAX_REQUEST_BYTES)
        try:
            return (await completions.create(**json.loads(body))).model_dump()
        except Exception as error:
            raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}") from None

    application = build_application({("POST", "/{key}/v1/chat/completions"): answer}, describe_error)
    async with serve_within(application, timeout=_CLIENT_TIMEOUT, connections=_MAX_CONNECTIONS) as port:
        yield f"http://127.0.0.1:{port}/{key}/v1"


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
    of an HTTP endpoint instead, for its own clients (``base_url``) or for other programs. A number that the function
    returns is the reward. ``parser`` is the format of the model's tool calls.
    """
    fn = resolve(run, "coalign_agents.agent")
    settings = bind(fn, arguments, "rollout.arguments")
    completions, events = (
        _ChatCompletions(episode, resolve(parser, "coalign_serve.formats")),
        asyncio.get_running_loop(),
    )

    def create(**request: Any) -> ChatCompletion:
        """Wait for the answer, in the thread of a plain function."""
        return asyncio.run_coroutine_threadsafe(completions.create(**request), events).result()

    if serve_http:
        async with _serve_chat(completions) as address:
            value = await call_function(fn, address, episode.row, **settings)
    else:
        suited = completions if inspect.iscoroutinefunction(fn) else SimpleNamespace(create=create)
        client = SimpleNamespace(chat=SimpleNamespace(completions=suited))
        value = await call_function(fn, client, episode.row, **settings)
    if value is not None:
        episode.reward(value)


def _check_agent(samples: Mapping[str, int], *, run: str, arguments: Mapping[str, Any], parser: str, **_: Any) -> None:
    bind(resolve(run, "coalign_agents.agent"), arguments, "rollout.arguments")
    resolve(parser, "coalign_serve.formats")


agent.check = _check_agent
