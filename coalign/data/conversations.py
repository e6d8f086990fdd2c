"""Conversations to learn from (supervised fine-tuning)."""

from __future__ import annotations

from typing import Any

from coalign.data.examples import Example, Examples


class ConversationSource(Examples):
    """Rows as conversations: tokens, and a loss mask over what the assistant says and the end of its turns.

    ``data.train_on`` narrows the mask to the assistant's last message, or widens it to every token. An Example's row is
    the data set's, with ``_source`` and ``_row`` (file name and row number, from 0).
    """

    longest = "max_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages, tools = self.reader.conversation(row), self.reader.tools(row)
        since = len(messages) - 1 if self.config.train_on == "last" else 0
        tokens, mask = self.template.conversation(messages, tools, since=since)
        if self.config.train_on == "all":
            mask = [True] * len(tokens)
        return [Example(tokens, dict(row), mask)]
