"""Requests of OpenAI's API for completions and chat completions, as they are read, checked and tokenised."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coalign.config.errors import describe_error, format_key, suggest
from coalign.config.schema import SamplingConfig
from coalign.data.images.expansion import Placeholders
from coalign.data.images.placeholders import read_part
from coalign.data.messages import parse_messages, parse_tools
from coalign.data.sources import BadRow
from coalign.data.templates import PlainText, Template, locate_images
from coalign.http_server import HttpRefusal
from coalign.types import ImageSpan
from coalign_serve.serving.engine_loop import GenerationJob
from coalign_serve.serving.request_images import RequestImages

MAX_ANSWERS = 128  # to one prompt
STREAM_BITS = 62  # width of the number that chooses random numbers
Unsupported = Literal[None, False, 0, 0.0, "", "none"]

Body = TypeVar("Body", bound="SamplingRequest")


class TokenizedPrompt(NamedTuple):
    """The tokens of a prompt, and where images stand in them."""

    tokens: list[int]
    images: tuple[ImageSpan, ...] = ()


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """The keys that both requests share. Keys that would change an answer, and that no engine knows, are refused.

    ``top_k``, ``min_p`` and ``repetition_penalty`` are not OpenAI's; vLLM has them, too.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These have no effect on an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # These are accepted with the value that changes nothing.
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer, and are left out of it."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    def limit_tokens(self, default: int) -> int:
        return default if self.max_tokens is None else self.max_tokens

    def plan(self, prompts: Sequence[TokenizedPrompt], default_limit: int) -> list[GenerationJob]:
        """Return a job for each prompt. Equal seeds sample alike; without one, every request samples differently."""
        settings = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(0, self.top_k or 0),
            "min_p": self.min_p or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
        }
        sampling = SamplingConfig.model_validate({name: value for name, value in settings.items()})
        first = secrets.randbits(STREAM_BITS) if self.seed is None else self.seed
        limit = self.limit_tokens(default_limit)
        return [
            GenerationJob(tokens, self.answers, sampling, limit, self.stops, (first + i) % 2**STREAM_BITS, images)
            for i, (tokens, images) in enumerate(prompts)
        ]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]


class ChatCompletionRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def limit_tokens(self, default: int) -> int:
        return super().limit_tokens(default) if self.max_completion_tokens is None else self.max_completion_tokens

    def decode_images(self, template: Template, images: RequestImages) -> None:
        """Decode each image once, which may take long; `tokenize` then knows its size. HttpRefusal for a bad one."""
        if template.placeholders is not None:
            try:
                messages = images.reader.read_messages(cast(Any, self.messages))
                Placeholders(template.placeholders.processor, images).find(messages)
            except ValueError as error:
                raise HttpRefusal(400, str(error)) from None

    def tokenize(self, template: Template, images: RequestImages | None = None) -> TokenizedPrompt:
        """Return what the answer continues. Raises HttpRefusal for what the template refuses, and for images that
        cannot be used; ``images`` reads them, None refuses them."""
        try:
            messages, placeholders = cast(Any, self.messages), template.placeholders
            if images is not None and placeholders is not None:
                messages = images.reader.read_messages(messages)
                template = copy(template)
                template.placeholders = Placeholders(placeholders.processor, images)
            elif any(read_part(item) is not None for item in _list_parts(messages)):
                raise BadRow("messages: this server reads text alone; one that is started with --images reads images")
            messages = parse_messages(messages, "messages", images=images is not None)
            tokens = template.prompt(messages, parse_tools(self.tools, "tools") if self.offers_tools else None)
            return TokenizedPrompt(tokens, locate_images(template, tokens, messages))
        except (BadRow, ValueError) as error:
            raise HttpRefusal(400, str(error)) from None


def _list_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    contents = [message.get("content") for message in messages]
    return [item for content in contents if isinstance(content, list) for item in content if isinstance(item, Mapping)]


class CompletionRequest(SamplingRequest):
    """The body of POST /v1/completions. A prompt is a text, or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def tokenize(self, plain: PlainText) -> list[TokenizedPrompt]:
        """Return the tokens of each prompt. Special tokens in a text are such tokens. Raises HttpRefusal."""
        if self.best_of not in (None, self.answers):
            raise HttpRefusal(400, f"best_of is {self.best_of}, and n is {self.answers}; leave best_of out")
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


def read_request(body: bytes, body_type: type[Body]) -> Body:
    """Read a request. Raises HttpRefusal that names each wrong key, and for an unknown one the nearest."""
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        problems = dict.fromkeys(_describe(e, body_type) for e in error.errors(include_url=False))
        raise HttpRefusal(400, "; ".join(list(problems)[:4])) from None


def _describe(problem: Any, body_type: type[BaseModel]) -> str:
    key = problem["loc"]
    if problem["type"] == "extra_forbidden":
        return f"{key[-1]}: unknown key{suggest(str(key[-1]), body_type.model_fields)}"
    limits = {"le": 0, "max_length": 0}
    if any(problem.get("ctx", {}).get(name) == value for name, value in limits.items()) and len(key) == 1:
        return f"{key[0]}: is not supported by this server; leave it out"
    return ": ".join(filter(None, (format_key(key[:1]), describe_error(problem))))
