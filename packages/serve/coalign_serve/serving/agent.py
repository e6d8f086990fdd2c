"""An episode behind the interface of OpenAI's chat completions, and the environment for agents that use it.

The client holds the episode, not the messages. Only the new messages of a request are rendered and appended; the
policy's earlier turns keep the tokens that were sampled. The same interface is served over HTTP on this machine, for
one episode.
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
    parse_arguments,
    read_answer,
    read_message,
)


class _HistoryRewritten(ValueError):
    """The messages do not continue the conversation that the episode holds."""


class _ChatCompletions:
    """Answers requests that each repeat the conversation so far. ``parser``: the format of the model's tool calls."""

    def __init__(self, episode: Episode, parser: Parser) -> None:
        self.episode = episode
        self.parser = parser
        self._history: list[tuple[Any, ...]] = []
        self._tools: Any = None

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
        """Return the policy's answer to ``messages``, which begin with the conversation so far, its own turns included.

        The run decides how tokens are sampled: ``temperature``, ``top_p``, ``seed`` and the like have no effect. Raises
        _HistoryRewritten if the messages do not continue the conversation, ValueError for n > 1 and for streams.
        """
        if n != 1 or stream:
            raise ValueError("a training episode gives one answer at a time (n=1), whole (stream=False)")
        sent = [read_message(message) for message in messages]
        self._append_new(sent, [dict(tool) for tool in tools] if tools else None)
        limit = max_completion_tokens or max_tokens
        start = len(self.episode.log.tokens)
        turn = await self.episode.generate(max_new_tokens=limit, stop=stop)
        answer = self._to_message(turn)
        message = answer.model_dump(exclude_none=True)
        self.episode.messages[-1:] = parse_messages([message], "messages")
        self._history = [*map(_comparison_key, sent), _comparison_key(message)]
        total = len(self.episode.log.tokens)
        return ChatCompletion(
            id=f"{self.episode.group}-{self.episode.index}-{start}",
            model=model,
            choices=[ChatChoice(message=answer, finish_reason=find_finish_reason(turn.status, answer))],
            usage=TokenUsage(
                prompt_tokens=total - len(turn.tokens), completion_tokens=len(turn.tokens), total_tokens=total
            ),
        )

    def _to_message(self, turn: Turn) -> ChatMessage:
        """Convert a turn to a message. If a tool call cannot be read, the turn stays text; the failure is counted."""
        message, unreadable = read_answer(turn, self.parser, f"call_{len(self.episode.log.tokens)}")
        if unreadable:
            self.episode.count("tool_failed/bad_json", unreadable)
        return message

    def _append_new(self, sent: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        if not self._history:
            self._tools = tools
            self.episode.begin(sent, tools=tools)
            return
        earlier = len(self._history)
        for i, (then, now) in enumerate(zip(self._history, map(_comparison_key, sent), strict=False)):
            if then != now:
                raise _HistoryRewritten(
                    f"message {i} is not what it was: {now[:2]} instead of {then[:2]}. Tokens that were sampled "
                    "cannot be changed: send the whole conversation and append to it"
                )
        new = sent[earlier:]
        if not new or any(message["role"] == "assistant" for message in new):
            what = "an answer that the policy did not give" if new else "no new message"
            raise _HistoryRewritten(
                f"after {earlier} messages there is {what}; an episode has one answer at each point"
            )
        if tools != self._tools:
            raise _HistoryRewritten("the tools are not those of the first call; they are part of the prompt")
        self.episode.say(*new)


def _comparison_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = [
        (call["function"]["name"], parse_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    content = message.get("content") or ""
    return message["role"], content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True), calls


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
    of an HTTP endpoint instead, for its own clients (``base_url``) or for other programs. Every request must continue
    the conversation: see coalign_serve.serving.agent. A number that the function returns is the reward. ``parser`` is
    the format of the model's tool calls.
    """
    fn = resolve(run, "coalign_serve.serving.agent")
    settings = bind(fn, arguments, "rollout.arguments")
    completions, events = (
        _ChatCompletions(episode, resolve(parser, "coalign.environments.parsers")),
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
    bind(resolve(run, "coalign_serve.serving.agent"), arguments, "rollout.arguments")
    resolve(parser, "coalign.environments.parsers")


agent.check = _check_agent
