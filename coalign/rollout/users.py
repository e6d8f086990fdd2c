"""Who may play the user in `simulated_user`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any


def scripted(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], random: Random) -> str | None:
    """What the row's list ``replies`` says, one after the other. ValueError for a row without it."""
    said = sum(message["role"] == "assistant" for message in messages) - 1
    asked = sum(message["role"] == "assistant" for message in row.get("messages") or [])  # before the episode
    if (replies := row.get("replies")) is None:
        raise ValueError(f"the row has no list `replies` of what the user says; it has {', '.join(sorted(row))}")
    return replies[said - asked] if said - asked < len(replies) else None
