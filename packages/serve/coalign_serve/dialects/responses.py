"""OpenAI's Responses.

Codex reads text from the `done` events alone, and pairs them with the final `output` by id, so both are written from
the same items.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from coalign.data.messages import REASONING_KEYS
from coalign.http_types import Event, HttpRefusal
from coalign_serve.dialects.chat import ChatCompletions
from coalign_serve.dialects.question import (
    Answer,
    Dialect,
    Json,
    Limit,
    Question,
    RequestBody,
    count_tokens,
    describe_function,
    parse_body,
    read_call,
    read_content,
    take,
)

_CALLS, _RESULTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class _Body(RequestBody):
    input: str | Annotated[list[Json], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit = None


class Responses(Dialect):
    path = "/responses"
    describe_error = staticmethod(ChatCompletions.describe_error)

    def __init__(self, question: Question, identity: str) -> None:
        super().__init__(question, identity)
        self._events = 0
        self._items: list[Json] = []

    @staticmethod
    def read(body: bytes) -> Question:
        asked = parse_body(body, _Body)
        if asked.settings.get("previous_response_id"):
            raise HttpRefusal(400, "previous_response_id: responses are not stored here; send the input whole")
        items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
        tools, custom, dropped = _read_tools(asked.tools or [])
        return Question(
            _join_system(asked.instructions, _read_items(items)),
            asked.model,
            tools or None,
            limit=asked.max_output_tokens,
            stream=bool(asked.stream),
            reads_calls=asked.tool_choice_type != "none",
            custom_tools=frozenset(custom),
            dropped_tools=tuple(dropped),
            settings=asked.settings,
        )

    def write(self, answers: Sequence[Answer]) -> Json:
        [answer] = answers
        return self._frame(answer, self._write_items(answer))

    def wait(self) -> Event:
        """Codex' clock counts events, not comments, and OpenAI's client expects the answer's own id from the first."""
        return self._event("response.in_progress" if self._events else "response.created", response=self._frame())

    def begin(self) -> Iterator[Event]:
        if not self._events:
            yield self._event("response.created", response=self._frame())
        yield self._event("response.in_progress", response=self._frame())

    def add(self, index: int, text: str, logprobs: Sequence[tuple[str, float]] = ()) -> Iterator[Event]:
        if index not in self._opened:
            self._opened.add(index)
            yield from self._open(self._message("", "in_progress"))
            part = self._message("")["content"][0]
            yield self._event("response.content_part.added", **self._at(content_index=0), part=part)
        yield self._event("response.output_text.delta", **self._at(content_index=0), delta=text, logprobs=[])

    def end(self, index: int, answer: Answer) -> Iterator[Event]:
        is_streamed = index in self._opened
        for item in self._write_items(answer):
            name = item["type"]
            if name == "message":
                if not is_streamed:
                    yield from self.add(index, answer.text)
                [part] = item["content"]
                at = self._at(content_index=0)
                yield self._event("response.output_text.done", **at, text=answer.text, logprobs=[])
                yield self._event("response.content_part.done", **at, part=part)
            elif name == "reasoning":
                yield from self._open(item | {"content": [], "status": "in_progress"})
                at = self._at(content_index=0)
                yield self._event("response.reasoning_text.delta", **at, delta=answer.reasoning)
                yield self._event("response.reasoning_text.done", **at, text=answer.reasoning)
            else:
                key = "arguments" if name == "function_call" else "input"
                event = f"response.{name}_{key}"
                yield from self._open(item | {key: "", "status": "in_progress"})
                yield self._event(f"{event}.delta", **self._at(), delta=item[key])
                yield self._event(f"{event}.done", **self._at(), **{key: item[key], "name": item["name"]})
            self._items[-1] = item
            yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def close(self, answers: Sequence[Answer]) -> Iterator[Event]:
        [answer] = answers
        end = "response.incomplete" if answer.finish == "length" else "response.completed"
        yield self._event(end, response=self._frame(answer, self._items))

    def fail(self, status: int, message: str) -> Event:
        frame = self._frame() | {"status": "failed", "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=frame, **self.describe_error(status, message))

    def _open(self, item: Json) -> Iterator[Event]:
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _at(self, **rest: int) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **rest}

    def _event(self, name: str, /, **data: Any) -> Event:
        self._events += 1
        return name, {"type": name, "sequence_number": self._events - 1, **data}

    def _message(self, text: str, status: str = "completed") -> Json:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        return {
            "type": "message",
            "id": f"msg_{self.identity}",
            "role": "assistant",
            "status": status,
            "content": content if status == "completed" else [],
        }

    def _write_items(self, answer: Answer) -> list[Json]:
        items: list[Json] = []
        if answer.reasoning:
            content = [{"type": "reasoning_text", "text": answer.reasoning}]
            head = {"type": "reasoning", "id": f"rs_{self.identity}", "summary": []}
            items.append({**head, "content": content, "status": "completed"})
        if answer.text or not answer.calls:
            items.append(self._message(answer.text))
        for number, call in enumerate(answer.calls):
            head = {"id": f"fc_{self.identity}_{number}", "call_id": call.id, "name": call.name, "status": "completed"}
            if call.name in self.question.custom_tools:
                value = json.loads(call.arguments).get("input", "")
                items.append({"type": "custom_tool_call", **head, "input": str(value)})
            else:
                items.append({"type": "function_call", **head, "arguments": call.arguments})
        return items

    def _frame(self, answer: Answer | None = None, items: Sequence[Json] = ()) -> Json:
        usage, status, details = None, "in_progress", None
        if answer is not None:
            sampled = count_tokens([answer])
            usage = {
                "input_tokens": self.prompt_tokens,
                "output_tokens": sampled,
                "total_tokens": self.prompt_tokens + sampled,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
            is_cut = answer.finish == "length"
            status, details = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "model": self.question.model,
            "status": status,
            "output": [*items],
            "error": None,
            "incomplete_details": details,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": usage,
        }


def _read_items(items: Sequence[Json]) -> list[Json]:
    """Return items as messages. What the assistant did between two others' words is one message."""
    messages: list[Json] = []

    def answer() -> Json:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        name = item.get("type", "message")
        if name == "message":
            role, content = take(item, "role", "a message"), read_content(item.get("content"))
            if role == "assistant":
                answer()["content"] = "\n".join(filter(None, (answer()["content"], content)))
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": content})
        elif name in _CALLS:
            arguments = item.get("arguments") if name == _CALLS[0] else {"input": item.get("input")}
            call = read_call(take(item, "call_id", name), take(item, "name", name), arguments)
            answer().setdefault("tool_calls", []).append(call)
        elif name in _RESULTS:
            result = {"tool_call_id": take(item, "call_id", name), "content": read_content(item.get("output"))}
            messages.append({"role": "tool", **result})
        elif name == "reasoning":
            if thoughts := read_content(item.get("content")):
                answer()[REASONING_KEYS[0]] = thoughts
        else:
            raise HttpRefusal(400, f"input: an item of type '{name}' cannot be shown to a model")
    return messages


def _join_system(instructions: str | None, messages: list[Json]) -> list[Json]:
    """Put the instructions and the leading system messages into one, as templates expect."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [*filter(None, [instructions]), *(read_content(message["content"]) for message in messages[:count])]
    return [*([{"role": "system", "content": "\n\n".join(map(str, texts))}] if texts else []), *messages[count:]]


def _read_tools(tools: Sequence[Json]) -> tuple[list[Json], list[str], list[str]]:
    """Return the functions, the names of those whose input is a text, and the types of tools that are none."""
    functions, custom, dropped = [], [], []
    for tool in tools:
        if tool.get("type") == "function":
            name = take(tool, "name", "a tool")
            functions.append(describe_function(name, tool.get("description"), tool.get("parameters")))
        elif tool.get("type") == "custom":
            functions.append(describe_function(take(tool, "name", "a tool"), tool.get("description"), _CUSTOM))
            custom.append(tool["name"])
        else:
            dropped.append(str(tool.get("type")))
    return functions, custom, dropped
