"""Prompts to generate from (reinforcement learning, evaluation, `coalign generate`)."""

from __future__ import annotations

from typing import Any

from coalign.data.examples import Example, Examples
from coalign.data.messages import prompt_text
from coalign.data.sources import BadRow


class PromptSource(Examples):
    """Rows as prompts, ready to be continued.

    An Example's row is the data set's, with these keys set: ``prompt`` (its text as people read it, without the
    template), ``messages`` (those that the template got), ``answer`` (the reference answer, if the row has one),
    ``_source`` and ``_row`` (file name and row number, from 0).
    """

    longest = "max_prompt_tokens"

    def encode(self, row: dict[str, Any]) -> list[Example]:
        messages = self.reader.prompt(row)
        tokens = self.template.prompt(messages, self.reader.tools(row))
        if not tokens:
            raise BadRow("the prompt has no tokens", "empty")
        reference = self.reader.reference(row)
        answer = {} if reference is None else {"answer": reference}
        return [Example(tokens, row | {"prompt": prompt_text(messages), "messages": messages} | answer)]
