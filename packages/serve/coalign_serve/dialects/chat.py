"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from coalign.http_types import Event
from coalign_serve.dialects.question import (
    MAX_ANSWERS,
    Answer,
    Dialect,
    Json,
    Limit,
    Question,
    RequestBody,
    Stop,
    StreamOptions,
    count_tokens,
    parse_body,
    read_stop,
    write_call,
)

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class _Body(RequestBody):
    messages: Annotated[list[Json], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    stop: Stop = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None


class ChatCompletions(Dialect):
    path = "/chat/completions"
    object_type, piece_type, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    @staticmethod
    def read(body: bytes) -> Question:
        asked = parse_body(body, _Body)
        functions = [tool for tool in asked.tools or [] if tool.get("type", "function") == "function"]
        return Question(
            [_read_message(message) for message in asked.messages],
            asked.model,
            functions or None,
            asked.n or 1,
            asked.max_completion_tokens or asked.max_tokens,
            read_stop(asked.stop),
            bool(asked.stream),
            wants_usage=asked.stream_options is not None and asked.stream_options.include_usage,
            wants_logprobs=bool(asked.logprobs),
            reads_calls=asked.tool_choice_type != "none",
            dropped_tools=tuple(str(tool["type"]) for tool in asked.tools or [] if tool not in functions),
            settings=asked.settings,
        )

    @staticmethod
    def describe_error(status: int, message: str) -> Json:
        error_type = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        code = "context_length_exceeded" if "context_length_exceeded" in message else status
        return {"error": {"message": message, "type": error_type, "param": None, "code": code}}

    def write(self, answers: Sequence[Answer]) -> Json:
        choices = [
            {
                "index": index,
                **self._write_answer(answer),
                "finish_reason": answer.finish,
                "logprobs": self._write_logprobs(index, answer.logprobs),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head(self.object_type), "choices": choices, "usage": self._count(answers)}

    def begin(self) -> Iterator[Event]:
        for index in range(self.question.answers):
            yield self._piece(index, {"role": "assistant", "content": ""})

    def add(self, index: int, text: str, logprobs: Sequence[tuple[str, float]] = ()) -> Iterator[Event]:
        self._opened.add(index)
        yield self._piece(index, {"content": text}, logprobs=logprobs)

    def end(self, index: int, answer: Answer) -> Iterator[Event]:
        if index not in self._opened:
            if answer.reasoning:
                yield self._piece(index, {"reasoning_content": answer.reasoning})
            if answer.text or answer.logprobs:
                yield from self.add(index, answer.text, answer.logprobs)
        for number, call in enumerate(answer.calls):  # first the name, then the arguments, as servers do
            named = write_call(call)
            arguments = named["function"].pop("arguments")
            opened = {"index": number, **named, "function": named["function"] | {"arguments": ""}}
            yield self._piece(index, {"tool_calls": [opened]})
            yield self._piece(index, {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
        yield self._piece(index, {}, answer.finish)

    def close(self, answers: Sequence[Answer]) -> Iterator[Event]:
        if self.question.wants_usage:
            yield None, {**self._head(self.piece_type), "choices": [], "usage": self._count(answers)}
        yield None, "[DONE]"

    def fail(self, status: int, message: str) -> Event:
        return None, self.describe_error(status, message)

    def _head(self, name: str) -> Json:
        identity = f"{self.prefix}-{self.identity}"
        return {"id": identity, "object": name, "created": self.created, "model": self.question.model}

    def _piece(
        self, index: int, delta: Json, finish: str | None = None, logprobs: Sequence[tuple[str, float]] = ()
    ) -> Event:
        choice = {"index": index, **self._write_delta(delta), "finish_reason": finish}
        choice["logprobs"] = self._write_logprobs(index, logprobs)
        return None, {**self._head(self.piece_type), "choices": [choice]}

    def _write_answer(self, answer: Answer) -> Json:
        content = answer.text or (None if answer.calls else "")
        return {"message": {**answer.message, "content": content, "refusal": None}}

    def _write_delta(self, delta: Json) -> Json:
        return {"delta": delta}

    def _write_logprobs(self, index: int, logprobs: Sequence[tuple[str, float]]) -> Json | None:
        if not self.question.wants_logprobs or not logprobs:
            return None
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
            for token, value in logprobs
        ]
        return {"content": content, "refusal": None}

    def _count(self, answers: Sequence[Answer]) -> Json:
        sampled = count_tokens(answers)
        total = self.prompt_tokens + sampled
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


def _read_message(message: Json) -> Json:
    """Return a message without keys that say nothing: clients send back all that they were sent."""
    known = {key: value for key, value in message.items() if value not in (None, [])}
    return known | {"role": "system"} if known.get("role") == "developer" else known
