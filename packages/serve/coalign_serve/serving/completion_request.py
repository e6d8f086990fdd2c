"""Requests for completions: how to sample, and what to go on from."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coalign.config.schema import SamplingConfig
from coalign.data.images.expansion import Placeholders
from coalign.data.images.placeholders import read_part
from coalign.data.messages import Message, parse_messages, parse_tools
from coalign.data.sources import BadRow
from coalign.data.templates import PlainText, Template, locate_images
from coalign.http_types import HttpRefusal
from coalign.types import ImageSpan
from coalign_serve.dialects.question import MAX_ANSWERS, Limit, Question, Stop, StreamOptions, read_stop, refuse
from coalign_serve.serving.engine_loop import GenerationJob
from coalign_serve.serving.request_images import RequestImages

STREAM_BITS = 62  # width of the number that chooses random numbers
# Clients ask for these without being asked to, and go on without them.
WISHES = {
    *("thinking", "reasoning", "reasoning_effort", "output_config", "verbosity", "context_management"),
    "parallel_tool_calls",
}


class _ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]


class _TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format: _ResponseFormat | None = None
    verbosity: Any = None


class TokenizedPrompt(NamedTuple):
    """The tokens of a prompt, and where images stand in them."""

    tokens: list[int]
    images: tuple[ImageSpan, ...] = ()


class SamplingSettings(BaseModel):
    """How to sample. Settings that would change an answer, and that no engine knows, are refused.

    ``top_k``, ``min_p`` and ``repetition_penalty`` are not OpenAI's; vLLM has them, too.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: int | None = None
    # These have no effect on an answer.
    user: Any = None
    metadata: Any = None
    client_metadata: Any = None
    store: Any = None
    include: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    cache_control: Any = None
    # These are accepted with the value that changes nothing.
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    response_format: _ResponseFormat | None = None
    text: _TextFormat | None = None

    def plan(self, prompts: Sequence[TokenizedPrompt], question: Question, default_limit: int) -> list[GenerationJob]:
        """Return a job for each prompt. Equal seeds sample alike; without one, every request samples differently."""
        sampling = SamplingConfig(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )
        first = secrets.randbits(STREAM_BITS) if self.seed is None else self.seed
        limit = default_limit if question.limit is None else question.limit
        return [
            GenerationJob(
                tokens, question.answers, sampling, limit, question.stop, (first + i) % 2**STREAM_BITS, images
            )
            for i, (tokens, images) in enumerate(prompts)
        ]


def read_settings(question: Question) -> tuple[SamplingSettings, list[str]]:
    """Return how to sample, and the wishes that are not granted: a model reads its prompt, and knows nothing of them.

    Raises HttpRefusal for any other key that this server does not know.
    """
    known = {key: value for key, value in question.settings.items() if key not in WISHES}
    try:
        settings = SamplingSettings.model_validate(known)
    except ValidationError as error:
        raise refuse(error, SamplingSettings) from None
    dropped = [f"tools.{name}" for name in question.dropped_tools]
    return settings, [*dropped, *sorted(question.settings.keys() - known.keys())]


def decode_images(messages: list[Message], template: Template, images: RequestImages) -> None:
    """Decode each image once, which may take long; `tokenize` then knows its size. HttpRefusal for a bad one."""
    if template.placeholders is not None:
        try:
            Placeholders(template.placeholders.processor, images).find(images.reader.read_messages(messages))
        except ValueError as error:
            raise HttpRefusal(400, str(error)) from None


def tokenize(question: Question, template: Template, images: RequestImages | None = None) -> TokenizedPrompt:
    """Return what the answer continues. Raises HttpRefusal for what the template refuses, and for images that cannot
    be used; ``images`` reads them, None refuses them."""
    messages, placeholders = question.messages, template.placeholders
    try:
        if images is not None and placeholders is not None:
            messages = images.reader.read_messages(messages)
            template = copy(template)
            template.placeholders = Placeholders(placeholders.processor, images)
        elif any(read_part(item) is not None for item in _list_parts(messages)):
            raise BadRow("messages: this server reads text alone; one that is started with --images reads images")
        messages = parse_messages(messages, "messages", images=images is not None)
        tokens = template.prompt(messages, parse_tools(question.tools, "tools") if question.tools else None)
        return TokenizedPrompt(tokens, locate_images(template, tokens, messages))
    except (BadRow, ValueError) as error:
        raise HttpRefusal(400, str(error)) from None


def _list_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    contents = [message.get("content") for message in messages]
    return [item for content in contents if isinstance(content, list) for item in content if isinstance(item, Mapping)]


class CompletionRequest(SamplingSettings):
    """The body of POST /v1/completions. A prompt is a text, or token ids."""

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Limit = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @property
    def question(self) -> Question:
        """What is asked beside the prompt."""
        return Question(
            [],
            self.model,
            answers=self.n or 1,
            limit=self.max_tokens,
            stop=read_stop(self.stop),
            stream=bool(self.stream),
            wants_usage=self.stream_options is not None and self.stream_options.include_usage,
            wants_logprobs=self.logprobs is not None,
        )

    def tokenize(self, plain: PlainText) -> list[TokenizedPrompt]:
        """Return the tokens of each prompt. Special tokens in a text are such tokens. Raises HttpRefusal."""
        if self.best_of not in (None, self.n or 1):
            raise HttpRefusal(400, f"best_of is {self.best_of}, and n is {self.n or 1}; leave best_of out")
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        try:
            return [
                TokenizedPrompt(plain.prompt([{"role": "user", "content": prompt}]))
                if isinstance(prompt, str)
                else TokenizedPrompt(prompt)
                for prompt in prompts
            ]
        except BadRow as error:
            raise HttpRefusal(400, str(error)) from None
