"""Records of OpenAI's API: chat completions, messages, tool calls, errors.

An agent's endpoint (agent.py) and `coalign serve` share it. The classes are our own, because importing
`openai.types.chat` takes 2 s and 500 modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coalign.data.messages import join_parts
from coalign.environments.episode import Turn
from coalign.types import Status
from coalign_serve.formats import ToolRequest

Parser = Callable[[Turn], tuple[str, list[ToolRequest]]]
FinishReason = Literal["stop", "length", "tool_calls"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow")


class _CalledFunction(_Record):
    name: str
    arguments: str  # JSON


class _ToolCall(_Record):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(_Record):
    content: str | None
    tool_calls: list[_ToolCall] | None = None
    role: Literal["assistant"] = "assistant"


class ChatChoice(_Record):
    message: ChatMessage
    finish_reason: FinishReason
    index: int = 0


class TokenUsage(_Record):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(_Record):
    """The result of `client.chat.completions.create`."""

    id: str
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    created: int = 0
    object: Literal["chat.completion"] = "chat.completion"


def read_message(message: Any) -> dict[str, Any]:
    """Convert a message to a dict with its text parts joined; clients also send back objects that they received."""
    plain = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    return {**plain, "content": join_parts(plain.get("content") or "")}


def parse_arguments(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def read_answer(turn: Turn, parser: Parser, prefix: str) -> tuple[ChatMessage, int]:
    """Convert a turn to a message, and count its unreadable tool calls; with one of these it stays text.

    ``prefix`` begins the ids of its calls.
    """
    text, calls = parser(turn) if turn.status == Status.OK else (turn.text, [])
    unreadable = sum(call.error is not None for call in calls)
    if not calls or unreadable:
        return ChatMessage(content=turn.text), unreadable
    requests = []
    for i, call in enumerate(calls):
        function = _CalledFunction(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
        requests.append(_ToolCall(id=f"{prefix}_{i}", function=function))
    return ChatMessage(content=text or None, tool_calls=requests), 0


def find_finish_reason(status: Status, answer: ChatMessage) -> FinishReason:
    """Return why an answer ended, in the API's words."""
    if status != Status.OK:
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def describe_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in the form of OpenAI's API."""
    error_type = _ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": error_type, "param": None, "code": status}}
