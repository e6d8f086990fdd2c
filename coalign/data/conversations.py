"""Conversations to learn from (supervised fine-tuning)."""

from __future__ import annotations

from typing import Any

from coalign.data.examples import Example, Examples
from coalign.data.sources import BadRow


class ConversationSource(Examples):
    """Rows as conversations: tokens, and a loss mask over what the assistant says and the end of its turns.

    ``data.train_on`` narrows the mask to the assistant's last message, or widens it to every token. Where a long one is
    cut on the left, its last answer stays whole, and something before it. An Example's row is the data set's, with
    ``_source`` and ``_row`` (file name and row number, from 0).
    """

    longest = "max_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages, tools = self.reader.conversation(row), self.reader.tools(row)
        since = len(messages) - 1 if self.config.train_on == "last" else 0
        tokens, mask = self.template.conversation(messages, tools, since=since)
        if self.config.train_on == "all":
            mask = [True] * len(tokens)
        return [Example(tokens, dict(row), mask)]

    def shortened(self, example: Example) -> Example:
        cut = super().shortened(example)
        dropped = len(example.tokens) - len(cut.tokens)
        if dropped and self.config.train_on != "all" and dropped >= _last_answer(example.loss_mask or []):
            raise BadRow(f"the last answer leaves no room for a question in {self.bound}", "long")
        return cut


def _last_answer(mask: list[bool]) -> int:
    """Where the last run of trained tokens begins."""
    end = len(mask) - mask[::-1].index(True)
    return next((t for t in range(end, 0, -1) if not mask[t - 1]), 0)
