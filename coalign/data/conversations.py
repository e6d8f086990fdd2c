"""Conversations to learn from (supervised fine-tuning)."""

from __future__ import annotations

from typing import Any

from coalign.data.examples import Example, Examples


class ConversationSource(Examples):
    """Rows as conversations: tokens, and a loss mask over what the assistant says and the end of its turns.

    An Example's row is the data set's, with ``_source`` and ``_row`` (file name and row number, from 0).
    """

    longest = "max_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        tokens, mask = self.template.conversation(self.reader.conversation(row))
        return [Example(tokens, dict(row), mask)]
