"""A question to a model and its answers, in whatever API they are written."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coalign.config.errors import describe_error, format_key, suggest
from coalign.data.messages import REASONING_KEYS, Message
from coalign.http_types import Event, HttpRefusal

MAX_ANSWERS = 128  # to one question
Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
Limit = Annotated[int, Field(ge=1)] | None
Stop = str | Annotated[list[str], Field(max_length=16)] | None


@dataclass(frozen=True)
class Question:
    """What a request asks for, in the form of chat templates.

    ``limit``: tokens of each of the ``answers``. ``custom_tools``: those whose input is a text; they are shown as
    functions with one argument, ``input``. ``reads_calls`` is False if the answer may call no tools. ``settings`` has
    the other keys of the request that have a value: how to sample, and wishes. ``dropped_tools``: types of tools that
    no function can stand for, such as a provider's web search.
    """

    messages: list[Message]
    model: str
    tools: list[Json] | None = None
    answers: int = 1
    limit: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    wants_usage: bool = True
    wants_logprobs: bool = False
    reads_calls: bool = True
    custom_tools: frozenset[str] = frozenset()
    dropped_tools: tuple[str, ...] = ()
    settings: Json = field(default_factory=dict)

    @property
    def offers_tools(self) -> bool:
        """Whether the answer may call tools."""
        return self.tools is not None and self.reads_calls


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Answer:
    """One answer. ``tokens``: how many were sampled; ``logprobs``: their texts and log-probs, where asked for."""

    text: str
    finish: Literal["stop", "length", "tool_calls"]
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    tokens: int = 0
    logprobs: Sequence[tuple[str, float]] = ()

    @property
    def message(self) -> Message:
        """The answer as a message of the assistant."""
        reasoning = {REASONING_KEYS[0]: self.reasoning} if self.reasoning else {}
        calls = {"tool_calls": [write_call(call) for call in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": self.text, **reasoning, **calls}


class Dialect(ABC):
    """Reads questions of one API. An instance writes the answers to one question: whole, or as events.

    The events are those of `begin`, of `add` and `end` for each answer, and of `close`, or of `fail` in between. Before
    them all, `wait` keeps the connection open.
    """

    path: ClassVar[str]  # below /v1

    def __init__(self, question: Question, identity: str) -> None:
        self.question, self.identity, self.created = question, identity, int(time.time())
        self.prompt_tokens = 0
        self._opened: set[int] = set()  # answers whose text is being sent

    @staticmethod
    @abstractmethod
    def read(body: bytes) -> Question:
        """Read a request. Raises HttpRefusal (400) that names the wrong key."""

    @staticmethod
    @abstractmethod
    def describe_error(status: int, message: str) -> Json: ...

    @abstractmethod
    def write(self, answers: Sequence[Answer]) -> Json:
        """Return the whole reply. ``prompt_tokens`` has to be set before."""

    def wait(self) -> Event:
        """Return what tells a client that its answer is being computed: a comment."""
        return None, None

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events before the first answer. ``prompt_tokens`` has to be set before."""

    @abstractmethod
    def add(self, index: int, text: str, logprobs: Sequence[tuple[str, float]] = ()) -> Iterator[Event]:
        """Yield the events of a piece of an answer's text."""

    @abstractmethod
    def end(self, index: int, answer: Answer) -> Iterator[Event]:
        """Yield what was not sent of an answer that has ended."""

    @abstractmethod
    def close(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """Yield the last events of all."""

    @abstractmethod
    def fail(self, status: int, message: str) -> Event:
        """Return the event of an error within a stream."""

    def write_events(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """Yield all events of answers that have ended."""
        yield from self.begin()
        for index, answer in enumerate(answers):
            yield from self.end(index, answer)
        yield from self.close(answers)


# ---- what readers share ----------------------------------------------------------------------------------------------


class RequestBody(BaseModel):
    """Keys that all three have. Others that have a value are the question's settings."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str = ""
    tools: list[Json] | None = None
    tool_choice: Any = None
    stream: bool | None = None

    @property
    def settings(self) -> Json:
        """The keys that the dialect does not read, and a ``tool_choice`` that is no more than a wish."""
        wish = None if self.tool_choice_type in (None, "auto", "none") else self.tool_choice
        rest = {**(self.model_extra or {}), "tool_choice": wish}
        return {key: value for key, value in rest.items() if value is not None}

    @property
    def tool_choice_type(self) -> Any:
        return self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else self.tool_choice


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


def parse_body(body: bytes, body_type: type[Body]) -> Body:
    """Read and check a request's body. Raises HttpRefusal that names each wrong key."""
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        raise refuse(error, body_type) from None


def refuse(error: ValidationError, body_type: type[BaseModel]) -> HttpRefusal:
    """Return a refusal that names each wrong key, and for an unknown one the nearest."""
    problems = dict.fromkeys(_describe(problem, body_type) for problem in error.errors(include_url=False))
    return HttpRefusal(400, "; ".join(list(problems)[:4]))


def _describe(problem: Any, body_type: type[BaseModel]) -> str:
    key = problem["loc"]
    if problem["type"] == "extra_forbidden":
        return f"{key[-1]}: unknown key{suggest(str(key[-1]), body_type.model_fields)}"
    limits = {"le": 0, "max_length": 0}
    if any(problem.get("ctx", {}).get(name) == value for name, value in limits.items()) and len(key) == 1:
        return f"{key[0]}: is not supported by this server; leave it out"
    return ": ".join(filter(None, (format_key(key[:1]), describe_error(problem))))


def read_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))


def read_content(content: Any) -> Any:
    """Return a content as a text, or as parts if there are images in it."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise HttpRefusal(400, f"content is {type(content).__name__}; expected a text or a list of parts")
    parts = [_read_part(part) for part in content]
    texts = [part.get("text") for part in parts]
    return "\n".join(map(str, texts)) if None not in texts else parts


def _read_part(part: Any) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise HttpRefusal(400, f"a part of content is {str(part)[:80]}; expected an object")
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if part.get("type") in ("text", "input_text", "output_text", "reasoning_text", "refusal"):
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    return part if part.get("type") in ("image_url", "input_image") else {"type": "text", "text": f"[{part['type']}]"}


def take(item: Any, key: str, label: str) -> Any:
    """Return ``item[key]``. Raises HttpRefusal if there is none."""
    if not isinstance(item, dict) or key not in item:
        raise HttpRefusal(400, f"{label} needs the key '{key}': {str(item)[:80]}")
    return item[key]


def describe_function(name: Any, description: Any, parameters: Any) -> Json:
    """Return a tool as chat templates show it."""
    parameters = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def write_call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def read_call(identity: Any, name: Any, arguments: Any) -> Json:
    """Return a call of an earlier answer as chat templates show it; ``arguments`` is JSON text, or an object."""
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def count_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.tokens for answer in answers)
