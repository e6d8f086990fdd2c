"""The question of a sample, for lists: the last turn of the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def find_question(sample: Mapping[str, Any]) -> str:
    """Return the user's last turn in the prompt of a record of samples.jsonl.

    Many prompts of a run begin with the same system prompt, and end with marks of the chat template. For a record
    without messages, its prompt is returned.
    """
    row = sample.get("row")
    row = row if isinstance(row, dict) else {}
    for messages in (row.get("messages"), sample.get("messages")):
        if isinstance(messages, list) and (texts := list(_read_turns(messages))):
            return texts[-1]
    plain = row.get("prompt")
    return plain if isinstance(plain, str) and plain else str(sample.get("prompt", ""))


def _read_turns(messages: Iterable[Any]) -> Iterable[str]:
    """Yield the texts of the user's turns."""
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user" and (text := _read_text(message.get("content"))):
            yield text


def _read_text(content: Any) -> str:
    """Return the text of a message's content, which is a text or a list of parts; `[image]` stands for an image."""
    if isinstance(content, str):
        return content.strip()
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return " ".join(part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type')}]" for part in parts)
