"""Where the data lies, which key of a row holds what, and what happens to rows that cannot be used."""

from __future__ import annotations

import string
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator

from coalign.config.schema.base import Input, Section, Several


class SourceConfig(Section):
    """One file, directory or data set of prompts or conversations."""

    shorthand = "path"

    path: Annotated[str, Input("file")]
    """JSONL, JSON, parquet, or a directory written by `datasets.save_to_disk`."""
    weight: NonNegativeFloat = 1.0
    """Probability of drawing from this source, relative to the others'."""
    prompt_key: str | None = None
    """None: the run's `data.prompt_key`; likewise below."""
    answer_key: str | None = None
    max_samples: PositiveInt | None = None


class DataConfig(Section):
    train: Annotated[Several[SourceConfig], Field(examples=["train.jsonl"])] = []
    """A path, a list of paths, or a list of {path, weight, …}."""
    eval: Annotated[Several[SourceConfig], Field(examples=["eval.jsonl"])] = []
    """Likewise, for evaluation."""
    prompt_key: str = "prompt"
    """A string, or a list of {role, content} messages."""
    answer_key: str = "answer"
    """For SFT: the response to learn, unless the prompt's messages hold it. Rewards see the whole row."""
    messages_key: str = "messages"
    """A whole conversation; where a row has it, it is used instead of prompt and answer."""
    system: str | None = None
    """System message put before each prompt."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's; `none`: prompt text as it is; or a Jinja template, or a file that holds one."""
    prompt_format: str = "{prompt}"
    """Python format string applied to a string prompt, with the row's keys, before the template."""
    max_prompt_tokens: PositiveInt = 1024
    max_tokens: PositiveInt | None = None
    """Of prompt and response together (SFT)."""
    on_empty: Literal["drop", "error"] = "drop"
    """What to do with a row without a prompt; drops are counted and reported, here and below."""
    on_missing_key: Literal["drop", "error"] = "error"
    """… with a row that lacks the prompt's or answer's key."""
    on_long: Literal["drop", "truncate_left", "error"] = "drop"
    """… with a prompt or conversation of too many tokens."""
    shuffle: bool = True

    @field_validator("prompt_format")
    @classmethod
    def _is_a_format(cls, value: str) -> str:
        try:
            list(string.Formatter().parse(value))
        except ValueError as error:
            raise ValueError(f"is no Python format string: {error}; a brace that is text is written twice") from error
        return value

    @field_validator("train", "eval")
    @classmethod
    def _something_to_draw(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        if sources and not any(source.weight for source in sources):
            raise ValueError("every source has weight 0, so there is none to draw from")
        return sources
