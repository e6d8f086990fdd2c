"""The reasoning of assistant messages: found under its names, kept or dropped, and put where a template reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from coalign.data.messages import Message, get_text

ReasoningPolicy = Literal["keep", "drop", "last"]

KEYS = ("reasoning_content", "thinking", "reasoning")  # of messages: vLLM's and Qwen's, gpt-oss', OpenAI's and others'
_BLOCK = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>\s*", re.DOTALL)


def split_reasoning(message: Message) -> tuple[str, Message]:
    """Return an assistant message's reasoning ("" for none) and the message without it.

    It is the value of one of KEYS, or a block at the beginning of the content that `</think>` ends; `<think>`, with
    which some templates begin the answer, may lack.
    """
    rest = {key: value for key, value in message.items() if key not in KEYS}
    if found := next((value for key in KEYS if isinstance(value := message.get(key), str) and value.strip()), ""):
        return found.strip(), rest
    block = _BLOCK.match(text := get_text(message))
    return (block[1].strip(), rest | {"content": text[block.end() :]}) if block else ("", rest)


def apply_policy(messages: Sequence[Message], policy: ReasoningPolicy | None) -> list[Message]:
    """Remove the reasoning that ``policy`` drops, and move the rest to ``reasoning_content``.

    `last` keeps what follows the last user message. None: the messages as they are.
    """
    if policy is None:
        return list(messages)
    since = {"keep": 0, "last": find_last_question(messages), "drop": len(messages)}[policy]
    return [
        _move(message, i >= since) if message["role"] == "assistant" else message for i, message in enumerate(messages)
    ]


def find_last_question(messages: Sequence[Message]) -> int:
    """Return the index of the last user message; 0 if there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)


def place_reasoning(messages: Sequence[Message], jinja: str) -> list[Message]:
    """Move ``reasoning_content`` to the key that the template ``jinja`` reads, or else into the content."""
    key = next((key for key in KEYS if re.search(rf"\b{key}\b", jinja)), None)
    if key == KEYS[0]:
        return list(messages)
    return [_place(message, key) if KEYS[0] in message else message for message in messages]


def _move(message: Message, keep: bool) -> Message:
    reasoning, rest = split_reasoning(message)
    return rest | {KEYS[0]: reasoning} if keep and reasoning else rest


def _place(message: Message, key: str | None) -> Message:
    reasoning, rest = split_reasoning(message)
    if key is not None:
        return rest | {key: reasoning}
    return rest | {"content": f"<think>\n{reasoning}\n</think>\n\n{get_text(rest)}"}
