"""Conversations to learn from (supervised fine-tuning)."""

from __future__ import annotations

from typing import Any

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.examples import Example, Examples
from coalign.data.messages import RowReader
from coalign.data.sources import Rows
from coalign.data.templates import Template


class ConversationSource(Examples):
    """Rows as conversations: tokens, and a loss mask over what the assistant says and the end of its turns.

    An Example's row is the data set's, with ``_source`` and ``_row`` (file name and row number, from 0).
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        config: DataConfig,
        source: SourceConfig,
        template: Template,
        limit: int | None = None,
    ) -> None:
        self.reader = RowReader.of(config, source)
        super().__init__(name, rows, config, config.max_tokens, template, limit)

    def encode(self, row: dict[str, Any]) -> Example:
        tokens, mask = self.template.conversation(self.reader.conversation(row))
        return Example(tokens, dict(row), mask)
