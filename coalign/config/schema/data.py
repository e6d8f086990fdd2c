"""Where the data lies, which key of a row holds what, and what happens to rows that cannot be used."""

from __future__ import annotations

import string
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from coalign.config.errors import Conflict, suggest
from coalign.config.schema.base import Drawn, InputPath, OneOrMore, ResultNeutral, Section


class SourceConfig(Section):
    """One file, directory or data set."""

    shorthand = "path"

    path: Drawn[Annotated[str, InputPath("file")]]
    """JSONL, JSON, parquet, text, a directory written by `datasets.save_to_disk`, or several by a pattern
    (`dir/*.jsonl`); for documents also the PREFIX.idx of an indexed dataset (`coalign indexed build`)."""
    weight: Drawn[NonNegativeFloat] = 1.0
    """Probability of drawing from this source, relative to the others'."""
    prompt_key: str | None = None
    """None: the run's `data.prompt_key`; likewise below."""
    answer_key: str | None = None
    max_samples: PositiveInt | None = None
    keys: dict[str, str] = {}
    """Other names in this source's rows: {our key: its key}, e.g. {chosen: response_a}; nested keys with dots."""


class DataConfig(Section):
    train: Annotated[Drawn[OneOrMore[SourceConfig]], Field(examples=["train.jsonl"])] = []
    """A path, a list of paths, or a list of {path, weight, …}."""
    eval: Annotated[Drawn[OneOrMore[SourceConfig]], Field(examples=["eval.jsonl"])] = []
    """Likewise, for evaluation."""
    mixing: Drawn[Literal["weight", "size", "tokens"]] = "weight"
    """Rows are drawn from a source in proportion to its `weight`, or to `weight` times its number of rows; or, by
    `tokens`, so that its share of all tokens is in proportion to its `weight`."""
    phases: Drawn[dict[str, NonNegativeFloat]] = {}
    """Splits every training source between several runs, e.g. {sft: 2, rm: 4, rl: 4}: shares that never meet."""
    phase: Drawn[str | None] = None
    """The share that this run trains on."""
    stream: Drawn[bool] = False
    """Read training sources as they come instead of going through them first: for more rows than one waits for. Rows
    are shuffled within a window; the run's length must be given in steps or tokens."""
    stream_window: Drawn[PositiveInt] = 10_000
    """Rows shuffled together when streaming."""
    cache: Drawn[ResultNeutral[str | None]] = None
    """A directory where tokenised sources are kept, by content of file, tokenizer, template and keys."""
    prompt_key: str = "prompt"
    """A string, or a list of {role, content} messages."""
    answer_key: str = "answer"
    """For SFT: the response to learn, unless the prompt's messages hold it. Rewards see the whole row."""
    messages_key: str = "messages"
    """A whole conversation; where a row has it, it is used instead of prompt and answer."""
    text_key: str = "text"
    """A document (pre-training)."""
    chosen_key: str = "chosen"
    """The better response: text, an assistant message, or the whole conversation."""
    rejected_key: str = "rejected"
    responses_key: str = "responses"
    """Several responses, ranked best first or scored under `scores_key`."""
    scores_key: str = "scores"
    margin_key: str = "margin"
    """How much better the chosen response is, where a row says it."""
    label_key: str = "label"
    """Whether a single response is desirable (KTO): true or false, 1 or 0."""
    steps_key: str = "steps"
    """The steps of a solution (process reward models): a list of texts."""
    labels_key: str = "labels"
    """Whether each step is right: true or false, or a probability."""
    tools_key: str = "tools"
    """Descriptions of tools (JSON Schema functions), handed to the chat template."""
    step_separator: str = "\n"
    """Ends each step; a process reward model judges at its last token."""
    step_tokens: Annotated[list[str], Field(min_length=2, max_length=2)] = ["+", "-"]
    """What a process reward model says of a right and of a wrong step: one token each."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a conversation are learned: all turns of the assistant, its last one, or every token."""
    system: str | None = None
    """System message put before each prompt."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's; `none`: prompt text as it is; or a Jinja template, or a file that holds one."""
    prompt_format: str = "{prompt}"
    """Python format string applied to the prompt (the last user message, if it is a list), with the row's keys."""
    max_prompt_tokens: PositiveInt = 1024
    """Of a prompt that is answered, or that responses are compared, labelled or judged by; not of a conversation."""
    max_tokens: PositiveInt | None = None
    """Of prompt and response together; documents are cut into pieces of this length."""
    on_empty: Literal["drop", "error"] = "drop"
    """What to do with a row without a prompt, text or response; drops are counted and reported, here and below."""
    on_missing_key: Literal["drop", "error"] = "error"
    """… with a row that lacks the prompt's or answer's key."""
    on_identical: Literal["drop", "error"] = "drop"
    """… with responses to compare that are all the same, or all ranked the same."""
    on_long: Literal["drop", "truncate_left", "error"] = "drop"
    """… with a prompt or conversation of too many tokens. What is to be answered is cut, never the (last) response."""
    shuffle: Drawn[bool] = True

    @model_validator(mode="after")
    def _phase_is_one_of_the_phases(self) -> Self:
        if self.phase is not None and self.phase not in self.phases:
            raise Conflict(("phase",), f"'{self.phase}' is not one of data.phases{suggest(self.phase, self.phases)}")
        if self.phases and self.phase is None:
            raise Conflict(
                ("phase",), f"missing: which of data.phases does this run train on ({', '.join(self.phases)})?"
            )
        return self

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
