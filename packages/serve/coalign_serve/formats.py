"""Formats of answers: what in a turn is text, what is reasoning, and what are tool calls.

serving/response_templates.py has those of most families as data. `hermes`, `llama` and a person's own are functions.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from coalign.config.errors import suggest
from coalign.config.functions import resolve
from coalign.data.messages import REASONING_KEYS
from coalign.data.templates import Tools
from coalign.environments.episode import Turn
from coalign_serve.serving.response_templates import TEMPLATES, TURN_END, UNREADABLE

__all__ = ["hermes", "llama"]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_END = re.compile(TURN_END)
_PIECE = 256  # characters that ResponseParser gets at once
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


@dataclass(frozen=True)
class ParsedAnswer:
    """What a turn says. If a template cannot read it, ``text`` is all of it, and ``calls`` has one with an error."""

    text: str
    reasoning: str = ""
    calls: Sequence[ToolRequest] = ()


class AnswerFormat(Protocol):
    """Parses a turn. ``tools``, as the chat template shows them, say of which types arguments are.

    ``prompt_end``: the decoded end of the prompt with its special tokens, where reasoning may begin.
    """

    def __call__(self, turn: Turn, tools: Tools | None = None, prompt_end: str = "") -> ParsedAnswer: ...


def find_format(name: str, tokenizer: Any = None) -> AnswerFormat:
    """Find a format: one of TEMPLATES, `hermes`, `llama`, `template`, or a function by its dotted path.

    `template` is the ``tokenizer``'s own `response_template`. A function converts a turn to its text and a list of
    ToolRequest. Raises ValueError for an unknown name, with the nearest one, and for a tokenizer without a template.
    """
    if ":" in name or name.lower() in __all__:
        return _adapt(resolve(name, __name__))
    if name == "template":
        if not (template := getattr(tokenizer, "response_template", None)):
            raise ValueError("format 'template': the model's tokenizer has no response_template; name another format")
        return _load(template)
    if name.lower() not in TEMPLATES:
        names = [*__all__, *TEMPLATES, "template"]
        raise ValueError(f"'{name}' is no format{suggest(name, names)} (a function of your own: `my.module:name`)")
    return _load_named(name.lower())


def check_format(name: str) -> None:
    """Refuse what `find_format` would, before the model's tokenizer is there."""
    if name != "template":
        find_format(name)


@cache
def _load_named(name: str) -> AnswerFormat:
    return _load(TEMPLATES[name])


def hermes(turn: Turn) -> tuple[str, list[ToolRequest]]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them: Hermes, Qwen2.5, Qwen3.

    The end of the turn also ends a call.
    """
    calls = [_read(inside, "arguments") for inside in _TAGGED.findall(turn.raw)] if "<tool_call>" in turn.raw else []
    return _TAGGED.sub("", turn.text).strip(), calls


def llama(turn: Turn) -> tuple[str, list[ToolRequest]]:
    """A turn that is only {"name": …, "parameters": {…}}, or several with `;` between them: Llama 3.1 and later.

    Any other turn is text.
    """
    text = turn.text.strip()
    if not re.match(r'\{\s*"(name|type)"', text):
        return text, []
    return "", [_read(call, "parameters") for call in re.split(r';(?=\s*\{\s*"(?:name|type)")', text)]


def _adapt(function: Callable[[Turn], tuple[str, list[ToolRequest]]]) -> AnswerFormat:
    def parse(turn: Turn, tools: Tools | None = None, prompt_end: str = "") -> ParsedAnswer:
        text, calls = function(turn)
        return ParsedAnswer(text, calls=tuple(calls))

    return parse


def _load(template: Mapping[str, Any]) -> AnswerFormat:
    """Compile a response template. Raises ValueError for a wrong one."""
    from transformers.utils.chat_parsing.response_parser import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

    compiled = load_response_template(dict(template))

    def parse(turn: Turn, tools: Tools | None = None, prompt_end: str = "") -> ParsedAnswer:
        raw, regions, body = _END.sub("", turn.raw), defaultdict(list), ""
        try:
            parser = ResponseParser(compiled, prompt_end, tools=list(tools or ()))
            # In pieces, because each region costs a search through all that was fed.
            events = [event for i in range(0, len(raw), _PIECE) for event in parser.feed(raw[i : i + _PIECE])]
            # The message of `finalize` has what the prompt wrote of the answer, too; these events are the turn's.
            for event in events + parser.finalize()[1]:
                body += event.get("text", "")
                if event["type"] == "region_close":
                    regions[event["field"]] += _list_calls(event["value"]) if event["field"] == "tool_calls" else [body]
                    body = ""
            if regions[UNREADABLE]:
                raise ValueError(regions[UNREADABLE])
        except ToolError as error:
            return ParsedAnswer(turn.text, calls=(ToolRequest("", error=error),))
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # TypeError: a client's schema is none
            reason = f"no valid JSON: {error.__cause__}" if error.__cause__ else "not in the form that was described"
            refusal = ToolError("bad_json", f"the call is {reason}")
            return ParsedAnswer(turn.text, calls=(ToolRequest("", error=refusal),))
        reasoning = [text for key in REASONING_KEYS for text in regions[key]]
        return ParsedAnswer(_join(regions["content"]), _join(reasoning), tuple(regions["tool_calls"]))

    return parse


def _join(texts: list[str]) -> str:
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def _list_calls(value: Any) -> list[ToolRequest]:
    """Convert what a template reads in one place: a call, or a list of them. Raises ToolError."""
    calls = value if isinstance(value, list) else [value]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return [_build_request(function, "arguments") for function in functions]


def _build_request(call: Any, key: str) -> ToolRequest:
    """Convert a call that was read. Raises ToolError if it is none, or if no template or tokenizer could write it."""
    try:
        json.dumps(call, ensure_ascii=False).encode()  # half a surrogate pair is no text: no tokenizer takes it
        if _is_deeper(call, _MAX_DEPTH):
            raise ValueError(f"more than {_MAX_DEPTH} levels of objects and lists")
    except (ValueError, RecursionError) as error:
        raise ToolError("bad_json", f"the call is no valid JSON: {error}") from error
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get(key, {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ToolError("bad_json", f'a call is an object {{"name": …, "{key}": {{…}}}}')
    return ToolRequest(name, arguments)


def _read(text: str, key: str) -> ToolRequest:
    try:
        return _build_request(json.loads(text), key)
    except (ValueError, RecursionError) as error:
        return ToolRequest("", error=ToolError("bad_json", f"the call is no valid JSON: {error}"))
    except ToolError as error:
        return ToolRequest("", error=error)


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether objects and lists are nested deeper than ``limit``."""
    level = [value]
    for _ in range(limit + 1):
        containers = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        ]
        level = [item for container in containers for item in container]
    return bool(level)
