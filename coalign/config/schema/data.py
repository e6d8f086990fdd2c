"""Data files, the meaning of the keys of their rows, and what happens to unusable rows."""

from __future__ import annotations

import glob
import string
from pathlib import PurePath
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from coalign.config.errors import Conflict, suggest
from coalign.config.schema.section import Continuable, Drawn, InputPath, OneOrMore, OutputPath, ResultNeutral, Section
from coalign.hub_data import CODECS, describe_source, is_dataset, is_url


class SourceConfig(Section):
    """One file, directory, dataset of the hub or URL."""

    shorthand = "path"

    path: Drawn[Annotated[str, InputPath("data")]]
    """JSONL, JSON, CSV, parquet, Arrow or text, compressed or not; a directory written by `datasets.save_to_disk`; a
    pattern (`dir/*.jsonl`); a dataset of the hub (`openai/gsm8k:main:train`); or a URL of a file. For documents also
    the PREFIX.idx of an indexed dataset (`coalign indexed build`)."""
    name: str | None = None
    """Name of its rows in metrics and in `reward[].sources`, unless a row has its own under the key `data_source`.
    None: the file's name without its ending. Several may share one."""
    weight: Drawn[NonNegativeFloat] = 1.0
    """Probability of drawing from this source, relative to the others'."""
    environment: str | None = None
    """A key of `rollout.environments`: what plays its rows, unless a row has its own under the key `environment`."""
    prompt_key: str | None = None
    """Key of the prompt in its rows; None: `data.prompt_key`."""
    answer_key: str | None = None
    """Key of the answer in its rows; None: `data.answer_key`."""
    max_samples: PositiveInt | None = None
    keys: dict[str, str] = {}
    """This source's own names: {our key: its key}, e.g. {chosen: response_a}; nested keys with dots."""
    keep_special_tokens: bool = False
    """Let rows write special tokens: `<|im_end|>` in a text is then that token. By default only the chat template can,
    and in a row it stays text. For texts that are rendered already, with `chat_template: none`."""

    @property
    def called(self) -> str:
        """Its name, or that of the file or the dataset (for a pattern like `gsm8k/*.jsonl` the folder's)."""
        if self.name or is_dataset(self.path):
            return self.name or describe_source(self.path).partition(":")[0]
        path = PurePath(urlsplit(self.path).path if is_url(self.path) else self.path)
        if glob.has_magic(path.name):
            return path.parent.name
        return PurePath(path.stem).stem if path.suffix in CODECS else path.stem


class ImagesConfig(Section):
    """How rows hold images, for models that see. An empty section reads them as they are."""

    root: Annotated[str, InputPath("data")] | None = None
    """Folder that relative paths start from. None: that of the row's file."""
    max_pixels: PositiveInt | None = None
    """Larger images are scaled down to this many pixels, before the model's own processor sees them."""
    max_file_pixels: PositiveInt = 50_000_000
    """A file that says it has more is refused before it is decoded."""
    video_fps: PositiveFloat = 2.0
    """Frames per second of videos whose files do not say so: lists and folders of frames."""


class DataConfig(Section):
    train: Annotated[Drawn[OneOrMore[SourceConfig]], Field(examples=["train.jsonl"])] = []
    """A path, a list of paths, or a list of {path, weight, …}."""
    eval: Annotated[Continuable[Drawn[OneOrMore[SourceConfig]]], Field(examples=["eval.jsonl"])] = []
    """Sources for evaluation, like `train`. Metrics of several are also reported for each, as `eval/SOURCE/…`."""
    mixing: Drawn[Literal["weight", "size", "tokens"]] = "weight"
    """The probability of drawing from a source is proportional to its `weight`; with `size`, to weight x rows; with
    `tokens`, its share of all tokens is proportional to its weight."""
    phases: Drawn[dict[str, NonNegativeFloat]] = {}
    """Splits each training source between several runs, e.g. {sft: 2, rm: 4, rl: 4}; no row is in two shares."""
    phase: Drawn[str | None] = None
    """Name of the share that this run trains on."""
    stream: Drawn[bool] = False
    """Read training sources while training, not completely before the first step: for very large data. What is read of
    a dataset of the hub is downloaded as it is read. Rows are shuffled within a window, and the length of the run must
    be set in steps or tokens."""
    stream_window: Drawn[PositiveInt] = 10_000
    """Rows shuffled together when streaming."""
    cache: Drawn[ResultNeutral[Annotated[str, OutputPath()] | None]] = None
    """A directory that keeps tokenised sources, by a hash of their contents, tokenizer, template and keys."""
    prompt_key: str = "prompt"
    """Key of the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "answer"
    """Key of the response to learn (SFT), unless the prompt's messages have it. Reward functions see all keys."""
    messages_key: str = "messages"
    """Key of a complete conversation; if a row has one, it replaces prompt and answer."""
    text_key: str = "text"
    """Key of a document (pre-training)."""
    chosen_key: str = "chosen"
    """Key of the better response: text, an assistant message, or the complete conversation."""
    rejected_key: str = "rejected"
    responses_key: str = "responses"
    """Key of several responses, ranked best first or scored under `scores_key`."""
    scores_key: str = "scores"
    margin_key: str = "margin"
    """Key of a number, if the row has one: how much better the chosen response is."""
    label_key: str = "label"
    """Key that says whether a single response is desirable (KTO): true or false, 1 or 0."""
    steps_key: str = "steps"
    """Key of the steps of a solution (process reward models): a list of texts."""
    labels_key: str = "labels"
    """Key of a list that says whether each step is right: true or false, or a probability."""
    tools_key: str = "tools"
    """Key of descriptions of tools (JSON Schema functions) for the chat template."""
    step_separator: str = "\n"
    """Ends each step; a process reward model scores a step at its last token."""
    step_tokens: Annotated[list[str], Field(min_length=2, max_length=2)] = ["+", "-"]
    """Answers of a process reward model for a right and for a wrong step: one token each."""
    images: ImagesConfig | None = None
    """Read the images of rows, and load models with what reads them (docs/images.md). None: text alone."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a conversation are learned: all turns of the assistant, its last one, or every token."""
    system: str | None = None
    """System message before each prompt that has none."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's; `none`: prompt text as it is; a training template of ours (`qwen3-training`, …); or a
    Jinja template, or a file that holds one."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(examples=[{"enable_thinking": False}])] = {}
    """Arguments of the chat template, in prompts, conversations and environments alike. `tools` are for rows that have
    none; `date` is what a template that asks for it calls today (2026-01-31)."""
    reasoning: Literal["keep", "drop", "last"] | None = None
    """Reasoning of assistant messages (`reasoning_content`, `thinking`, or blocks of think tags): `keep` that of all
    turns, `drop` it, or `last`: only since the last user message, as most models read at inference. SFT then learns a
    sequence for each user message. None: what the rows hold and the template shows of it."""
    prompt_format: str = "{prompt}"
    """Python format string applied to the prompt (the last user message, if it is a list), with the row's keys."""
    max_prompt_tokens: PositiveInt = 1024
    """Token limit of prompts, also of those with responses to compare, label or score; not of conversations."""
    max_tokens: PositiveInt | None = None
    """Token limit of prompt and response together; longer documents are split into pieces of this length."""
    on_empty: Literal["drop", "error"] = "drop"
    """Treatment of rows without a prompt, text or response. Dropped rows are counted and reported, here and below."""
    bad_rows: Literal["drop", "error"] = "error"
    """Treatment of rows that lack the key of the prompt or answer, or whose images cannot be read or do not match the
    placeholders in their text."""
    on_identical: Literal["drop", "error"] = "drop"
    """Treatment of rows whose responses to compare are all the same, or all ranked the same."""
    on_long: Literal["drop", "truncate_left", "error"] = "drop"
    """Treatment of rows with too many tokens. `truncate_left` cuts the prompt, never the (last) response."""
    shuffle: Drawn[bool] = True

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

    def check(self) -> None:
        if self.train_on == "all" and self.reasoning == "last":
            raise Conflict(
                ("reasoning",), "is 'last', which makes several sequences of a row; with train_on: all, each token once"
            )
        if self.phase is not None and self.phase not in self.phases:
            raise Conflict(("phase",), f"'{self.phase}' is not one of data.phases{suggest(self.phase, self.phases)}")
        if self.phases and self.phase is None:
            raise Conflict(
                ("phase",), f"missing: which of data.phases does this run train on ({', '.join(self.phases)})?"
            )
