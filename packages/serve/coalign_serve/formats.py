"""Formats of tool calls: functions from a turn to its text and the tool calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coalign.data.templates import Tools
from coalign.environments.episode import Turn

__all__ = ["hermes", "llama"]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MAX_DEPTH = 64  # levels of a call's arguments; chat templates and JSON writers recurse


class ToolError(Exception):
    """Why a call has no result; ``reason`` is the metric it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ToolRequest:
    """A tool call of the policy; ``error`` if it cannot be read."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: ToolError | None = None


def hermes(turn: Turn) -> tuple[str, list[ToolRequest]]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them: Hermes, Qwen2.5, Qwen3.

    The end of the turn also ends a call.
    """
    calls = [_read(inside, "arguments") for inside in _TAGGED.findall(turn.raw)] if "<tool_call>" in turn.raw else []
    return _TAGGED.sub("", turn.text).strip(), calls


def llama(turn: Turn) -> tuple[str, list[ToolRequest]]:
    """A turn that is only {"name": …, "parameters": {…}}: Llama 3.1 and later. Any other turn is text."""
    text = turn.text.strip()
    if not re.match(r'\{\s*"(name|type)"', text):
        return text, []
    return "", [_read(text, "parameters")]


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether objects and lists are nested deeper than ``limit``."""
    level = [value]
    for _ in range(limit + 1):
        containers = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        ]
        level = [item for container in containers for item in container]
    return bool(level)


def _read(text: str, key: str) -> ToolRequest:
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False).encode()  # half a surrogate pair is no text: no tokenizer takes it
        if _is_deeper(call, _MAX_DEPTH):
            raise ValueError(f"more than {_MAX_DEPTH} levels of objects and lists")
    except (ValueError, RecursionError) as error:
        return ToolRequest("", error=ToolError("bad_json", f"the call is no valid JSON: {error}"))
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get(key, {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolRequest("", error=ToolError("bad_json", f'a call is an object {{"name": …, "{key}": {{…}}}}'))
    return ToolRequest(name, arguments)


@dataclass(frozen=True)
class ParsedAnswer:
    text: str
    reasoning: str = ""
    calls: Sequence[ToolRequest] = ()


class AnswerFormat(Protocol):
    def __call__(self, turn: Turn, tools: Tools | None = None, prompt_end: str = "") -> ParsedAnswer: ...


def find_format(name: str) -> AnswerFormat:
    from coalign.config.functions import resolve

    read = resolve(name, "coalign_serve.formats")

    def parse(turn: Turn, tools: Tools | None = None, prompt_end: str = "") -> ParsedAnswer:
        text, calls = read(turn)
        return ParsedAnswer(text, "", calls)

    return parse
