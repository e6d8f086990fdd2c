"""Anthropic's Messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from coalign.data.messages import REASONING_KEYS
from coalign.http_types import Event
from coalign_serve.dialects.question import (
    Answer,
    Dialect,
    Json,
    Limit,
    Question,
    RequestBody,
    ToolCall,
    count_tokens,
    describe_function,
    parse_body,
    read_call,
    read_content,
    read_stop,
    take,
)

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# The first block of Claude Code's system prompt: it differs between requests, and says nothing to a model.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


class _Body(RequestBody):
    messages: Annotated[list[Json], Field(min_length=1)]
    system: str | list[Any] | None = None
    max_tokens: Limit = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None


class Messages(Dialect):
    path = "/messages"

    def __init__(self, question: Question, identity: str) -> None:
        super().__init__(question, identity)
        self._blocks = 0

    @staticmethod
    def read(body: bytes) -> Question:
        asked = parse_body(body, _Body)
        messages = [message for sent in asked.messages for message in _read_message(sent)]
        if system := _BILLING.sub("", str(read_content(asked.system))):
            messages.insert(0, {"role": "system", "content": system})
        tools, dropped = [], []
        for tool in asked.tools or []:
            if "input_schema" in tool:
                name = take(tool, "name", "a tool")
                tools.append(describe_function(name, tool.get("description"), tool["input_schema"]))
            else:
                dropped.append(str(tool.get("type")))
        return Question(
            messages,
            asked.model,
            tools or None,
            limit=asked.max_tokens,
            stop=read_stop(asked.stop_sequences),
            stream=bool(asked.stream),
            reads_calls=asked.tool_choice_type != "none",
            dropped_tools=tuple(dropped),
            settings=asked.settings,
        )

    @staticmethod
    def describe_error(status: int, message: str) -> Json:
        types = {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            409: "invalid_request_error",
            413: "request_too_large",
            429: "rate_limit_error",
        }
        return {"type": "error", "error": {"type": types.get(status, "api_error"), "message": message}}

    def write(self, answers: Sequence[Answer]) -> Json:
        [answer] = answers
        blocks: list[Json] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": self.identity})
        if answer.text or not answer.calls:
            blocks.append({"type": "text", "text": answer.text})
        blocks += [_write_use(call) for call in answer.calls]
        return {**self._head(count_tokens(answers)), "content": blocks, "stop_reason": _STOPS[answer.finish]}

    def wait(self) -> Event:
        return self._event("ping")

    def begin(self) -> Iterator[Event]:
        yield self._event("message_start", message=self._head(0))

    def add(self, index: int, text: str, logprobs: Sequence[tuple[str, float]] = ()) -> Iterator[Event]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._open({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def end(self, index: int, answer: Answer) -> Iterator[Event]:
        is_streamed = index in self._opened
        for block in self.write([answer])["content"]:
            if block["type"] == "text":
                if not is_streamed:
                    yield from self.add(index, block["text"])
            elif block["type"] == "thinking":
                yield self._open({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": block["thinking"]})
                yield self._delta({"type": "signature_delta", "signature": block["signature"]})
            else:
                yield self._open(block | {"input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            yield self._event("content_block_stop", index=self._blocks - 1)

    def close(self, answers: Sequence[Answer]) -> Iterator[Event]:
        [answer] = answers
        delta = {"stop_reason": _STOPS[answer.finish], "stop_sequence": None}
        yield self._event("message_delta", delta=delta, usage=self._head(answer.tokens)["usage"])
        yield self._event("message_stop")

    def fail(self, status: int, message: str) -> Event:
        return "error", self.describe_error(status, message)

    def _head(self, sampled: int) -> Json:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": sampled}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        head = {"id": f"msg_{self.identity}", "type": "message", "role": "assistant", "model": self.question.model}
        return {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _open(self, block: Json) -> Event:
        self._blocks += 1
        return self._event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: Json) -> Event:
        return self._event("content_block_delta", index=self._blocks - 1, delta=delta)

    @staticmethod
    def _event(name: str, /, **data: Any) -> Event:
        return name, {"type": name, **data}


def _read_message(message: Json) -> list[Json]:
    """Return a message as those of chat templates: results of tools are messages before the rest of it."""
    role = take(message, "role", "a message")
    content = message.get("content")
    blocks: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    types = [take(block, "type", "a block of content") for block in blocks]
    if role == "assistant":
        calls = [
            read_call(take(block, "id", "tool_use"), take(block, "name", "tool_use"), block.get("input") or {})
            for block, name in zip(blocks, types, strict=True)
            if name == "tool_use"
        ]
        thoughts = "".join(str(block.get("thinking")) for block in blocks if block["type"] == "thinking")
        said = [block for block in blocks if block["type"] == "text"]
        answer = {"role": "assistant", "content": read_content(said)}
        return [answer | ({REASONING_KEYS[0]: thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})]
    results = [
        {
            "role": "tool",
            "tool_call_id": take(block, "tool_use_id", "tool_result"),
            "content": read_content(block.get("content")),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    rest = [block for block in blocks if block["type"] != "tool_result"]
    return [*results, *([{"role": role, "content": read_content(rest)}] if rest else [])]


def _write_use(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
