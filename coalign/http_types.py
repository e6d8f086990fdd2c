"""What reads and writes HTTP shares with servers, without loading one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = tuple[str | None, dict[str, Any] | str | None]  # a server-sent one: name and data; without data a comment


class HttpRefusal(Exception):
    """An answer with an error's ``status`` and a message that says why."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
