"""Chat messages of rows: validated, normalised, and converted to text.

A message is a dict with ``role`` and ``content`` (a text, or a list of parts as in chat APIs). Its other keys are for
the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from coalign.data.sources import BadRow

Message = dict[str, Any]

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def parse_messages(value: Any, key: str) -> list[Message]:
    """Validate the list of messages under ``key``. BadRow for any other value."""
    if not isinstance(value, list):
        raise BadRow(f"'{key}' is {type(value).__name__}; expected a string or a list of {{role, content}} messages")
    return [_message(message, f"'{key}': message {i}") for i, message in enumerate(value)]


def parse_response(value: Any, key: str) -> list[Message]:
    """Convert the response under ``key`` to messages: a text, a message of the assistant, or a list of messages.

    BadRow (empty) if no message has content.
    """
    if isinstance(value, str):
        messages = [{"role": "assistant", "content": value}]
    elif isinstance(value, dict):
        messages = [_message(value, f"'{key}'")]
    else:
        messages = parse_messages(value, key)
    if not has_content(messages):
        raise BadRow(f"'{key}' is empty", "empty")
    return messages


def parse_transcript(text: str, key: str) -> list[Message]:
    """Split a text like "\\n\\nHuman: …\\n\\nAssistant: …" (Anthropic's hh-rlhf) into turns. BadRow for others."""
    before, *turns = TURN.split(text)
    if before.strip() or not turns:
        raise BadRow(
            f"the row has no prompt, and '{key}' is a text that does not hold one either (as messages, or as "
            "'\\n\\nHuman: …\\n\\nAssistant: …'); name the prompt's key in data.prompt_key",
            "missing",
        )
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": text.strip()} for speaker, text in pairs]


def trim_to_assistant(messages: list[Message]) -> list[Message]:
    """Drop what follows the assistant's last message. BadRow (empty) if there is none, or if it has no content."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not has_content(messages[-1:]):
        raise BadRow("the assistant's last message is empty" if messages else "no message of the assistant", "empty")
    return messages


def has_content(messages: Iterable[Message]) -> bool:
    """Whether any message has text or a tool call."""
    return any(get_text(message).strip() or message.get("tool_calls") for message in messages)


def get_text(message: Message) -> str:
    content = message["content"]
    return "".join(part.get("text") or "" for part in content) if isinstance(content, list) else content


def format_prompt(messages: list[Message]) -> str:
    """Format a prompt for people: a single message as it is, several as "role: text" paragraphs."""
    spoken = [m for m in messages if m["role"] != "system"]
    if len(spoken) == 1:
        return get_text(spoken[0])
    return "\n\n".join(f"{m['role']}: {get_text(m)}" for m in spoken)


def parse_tools(value: Any, key: str) -> list[dict[str, Any]] | None:
    """Parse descriptions of tools: a list of JSON Schema objects, or JSON text of it. None for an empty list."""
    value = _parse_json(value, key)
    tools = [_parse_json(tool, key) for tool in value] if isinstance(value, list) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"'{key}' is no list of JSON Schema functions: {str(value)[:80]}")
    return tools or None


def _message(value: Any, place: str) -> Message:
    """Validate a message, set a content, and drop keys that are None: tables have all columns in all rows."""
    calls = value.get("tool_calls") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("role") is None or not (calls or "content" in value):
        raise BadRow(f"{place} is not an object with role and content: {str(value)[:80]}")
    if not isinstance(value.get("content"), str | list | None):
        raise BadRow(f"{place}: content is {type(value['content']).__name__}; expected a string or a list of parts")
    message = {"content": ""} | {key: part for key, part in value.items() if part is not None}
    return message | {"tool_calls": [_tool_call(call, place) for call in calls]} if calls else message


def _tool_call(call: Any, place: str) -> Any:
    """Convert a tool call's arguments from JSON text, as in chat APIs, to an object, as templates expect."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise BadRow(f"{place}: a tool call is an object with function: {{name, arguments}}, not {str(call)[:80]}")
    if not isinstance(function.get("arguments"), str):
        return call
    function = function | {"arguments": _parse_json(function["arguments"], "arguments")}
    return call | {"function": function} if "function" in call else function


def _parse_json(value: Any, key: str) -> Any:
    """Parse a JSON text; return any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise BadRow(f"'{key}' is no valid JSON: {error.msg} (column {error.colno})") from error
