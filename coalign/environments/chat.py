"""An episode behind the interface of OpenAI's chat completions, and the environment of agents written against that.

The client holds the episode, not the messages. Only the new messages of a request are rendered and appended; the
policy's earlier turns keep the tokens that were sampled. The same interface is served over HTTP on this machine, for
one episode. The answer's classes are our own, because importing `openai.types.chat` takes 2 s and 500 modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coalign.config.functions import bind, resolve
from coalign.data.messages import get_text
from coalign.environments.conversation import call_function
from coalign.environments.episode import Episode, Turn
from coalign.environments.parsers import ToolRequest
from coalign.types import Status

Parser = Callable[[Turn], tuple[str, list[ToolRequest]]]


class HistoryRewritten(ValueError):
    """The messages do not continue the conversation that the episode holds."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow")


class CalledFunction(_Record):
    name: str
    arguments: str  # JSON


class ToolCall(_Record):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(_Record):
    content: str | None
    tool_calls: list[ToolCall] | None = None
    role: Literal["assistant"] = "assistant"


class ChatChoice(_Record):
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int = 0


class TokenUsage(_Record):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(_Record):
    """What `client.chat.completions.create` returns."""

    id: str
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    created: int = 0
    object: Literal["chat.completion"] = "chat.completion"


class ChatCompletions:
    """The conversation so far, which every request has to repeat. ``parser``: the format of the model's tool calls."""

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
        """The policy's answer to ``messages``, which begin with everything said before, the policy's turns included.

        The run decides how tokens are sampled: ``temperature``, ``top_p``, ``seed`` and the like have no effect. Raises
        HistoryRewritten if the messages do not continue the conversation, ValueError for n > 1 and for streams.
        """
        if n != 1 or stream:
            raise ValueError("a training episode gives one answer at a time (n=1), whole (stream=False)")
        sent = [_to_dict(message) for message in messages]
        self._append_new(sent, [dict(tool) for tool in tools] if tools else None)
        limit = max_completion_tokens or max_tokens
        before = len(self.episode.log.tokens)
        turn = await self.episode.generate(max_new_tokens=limit, stop=stop)
        answer = self._to_message(turn)
        message = answer.model_dump(exclude_none=True)
        self.episode.messages[-1] = _with_objects(message)
        self._history = [*map(_comparison_key, sent), _comparison_key(message)]
        total = len(self.episode.log.tokens)
        return ChatCompletion(
            id=f"{self.episode.group}-{self.episode.index}-{before}",
            model=model,
            choices=[ChatChoice(message=answer, finish_reason=_finish_reason(turn, answer))],
            usage=TokenUsage(
                prompt_tokens=total - len(turn.tokens), completion_tokens=len(turn.tokens), total_tokens=total
            ),
        )

    def _to_message(self, turn: Turn) -> ChatMessage:
        """The turn as a message. If a tool call cannot be read, the turn stays text, and the failure is counted."""
        text, calls = self.parser(turn) if turn.status == Status.OK else (turn.text, [])
        if unreadable := sum(call.error is not None for call in calls):
            self.episode.count("tool_failed/bad_json", unreadable)
        if not calls or unreadable:
            return ChatMessage(content=turn.text)
        at, requests = len(self.episode.log.tokens), []
        for i, call in enumerate(calls):
            function = CalledFunction(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
            requests.append(ToolCall(id=f"call_{at}_{i}", function=function))
        return ChatMessage(content=text or None, tool_calls=requests)

    def _append_new(self, sent: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        if not self._history:
            self._tools = tools
            self.episode.begin([_with_objects(message) for message in sent], tools=tools)
            return
        known = len(self._history)
        for i, (before, now) in enumerate(zip(self._history, map(_comparison_key, sent), strict=False)):
            if before != now:
                raise HistoryRewritten(
                    f"message {i} is not what it was: {now[:2]} instead of {before[:2]}. Tokens that were sampled "
                    "cannot be changed: send the whole conversation and append to it"
                )
        new = sent[known:]
        if not new or any(message["role"] == "assistant" for message in new):
            what = "an answer that the policy did not give" if new else "no new message"
            raise HistoryRewritten(f"after {known} messages there is {what}; an episode has one answer at each point")
        if tools != self._tools:
            raise HistoryRewritten("the tools are not those of the first call; they are part of the prompt")
        self.episode.say(*map(_with_objects, new))


def _to_dict(message: Any) -> dict[str, Any]:
    """A message as a dict; clients also send back the objects that they received."""
    plain = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    return {**plain, "content": get_text({"content": plain.get("content") or ""})}


def _comparison_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = [
        (call["function"]["name"], _parse_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return message["role"], (message.get("content") or "").strip(), calls


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as chat templates expect it: tool arguments as objects, not JSON text."""
    result = {"content": "", **message}
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parse_arguments(call["function"]["arguments"])}}
            for call in calls
        ]
    return result


def _parse_arguments(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _finish_reason(turn: Turn, answer: ChatMessage) -> Literal["stop", "length", "tool_calls"]:
    if turn.status != Status.OK:
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


_MAX_BYTES = 64 * 2**20  # of a request
_SECONDS, _CONNECTIONS = 60.0, 64  # that a connection may wait for the client; that are open


@contextlib.asynccontextmanager
async def serve_chat(completions: ChatCompletions) -> AsyncIterator[str]:
    """Serve POST <address>/chat/completions to this machine within this context.

    The address ends in /v1 and holds a key, since every user and program of the machine reaches its port.
    """
    from coalign.http_server import HttpRefusal, Request, build_application, read_body, serve_within

    key = secrets.token_urlsafe(32)

    async def answer(request: Request) -> dict[str, Any]:
        if not secrets.compare_digest(request.path_params["key"].encode(), key.encode()):
            raise HttpRefusal(HTTPStatus.UNAUTHORIZED, "this is not the address that the agent was given")
        body = await read_body(request, _MAX_BYTES)
        try:
            return (await completions.create(**json.loads(body))).model_dump()
        except Exception as error:
            raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}") from None

    application = build_application({("POST", "/{key}/v1/chat/completions"): answer}, _describe_error)
    async with serve_within(application, timeout=_SECONDS, connections=_CONNECTIONS) as port:
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
    the conversation: see coalign.environments.chat. A number that the function returns is the reward. ``parser`` is the
    format of the model's tool calls.
    """
    fn = resolve(run, "coalign.environments.chat")
    settings = bind(fn, arguments, "rollout.arguments")
    completions, events = (
        ChatCompletions(episode, resolve(parser, "coalign.environments.parsers")),
        asyncio.get_running_loop(),
    )

    def create(**request: Any) -> ChatCompletion:
        """Wait for the answer, in the thread of a plain function."""
        return asyncio.run_coroutine_threadsafe(completions.create(**request), events).result()

    if serve_http:
        async with serve_chat(completions) as address:
            value = await call_function(fn, address, episode.row, **settings)
    else:
        suited = completions if inspect.iscoroutinefunction(fn) else SimpleNamespace(create=create)
        client = SimpleNamespace(chat=SimpleNamespace(completions=suited))
        value = await call_function(fn, client, episode.row, **settings)
    if value is not None:
        episode.reward(value)


def _check_agent(samples: Mapping[str, int], *, run: str, arguments: Mapping[str, Any], parser: str, **_: Any) -> None:
    bind(resolve(run, "coalign.environments.chat"), arguments, "rollout.arguments")
    resolve(parser, "coalign.environments.parsers")


agent.check = _check_agent


def _describe_error(status: int, message: str) -> dict[str, Any]:
    """An error in the form of OpenAI's API."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": status}}
