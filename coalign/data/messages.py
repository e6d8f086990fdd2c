"""From a row's keys to messages: which key holds what, the system message, and the prompt format.

It judges whether a row has what it needs (BadRow with the reason otherwise) and neither tokenises nor drops anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.sources import BadRow
from coalign.data.templates import Message


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads prompts and conversations out of rows; the fields are those of DataConfig."""

    prompt_key: str
    answer_key: str
    messages_key: str
    prompt_format: str
    system: str | None

    @staticmethod
    def of(config: DataConfig, source: SourceConfig) -> RowReader:
        """The run's keys, with those that the source sets itself."""
        return RowReader(
            prompt_key=source.prompt_key or config.prompt_key,
            answer_key=source.answer_key or config.answer_key,
            messages_key=config.messages_key,
            prompt_format=config.prompt_format,
            system=config.system,
        )

    def prompt(self, row: dict[str, Any]) -> list[Message]:
        """What the model has to answer: the row's messages without the assistant's last ones, or its prompt."""
        messages = self._read(row)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self._with_system(messages)

    def reference(self, row: dict[str, Any]) -> Any | None:
        """The answer that the row gives to its prompt: under the answer key, or in the assistant's last message."""
        if self.answer_key in row:
            return row[self.answer_key]
        last = self._read(row)[-1]
        return _text(last) if last["role"] == "assistant" else None

    def conversation(self, row: dict[str, Any]) -> list[Message]:
        """What the model has to learn, up to the assistant's last message."""
        messages = self._read(row)
        if row.get(self.messages_key) is None and messages and messages[-1]["role"] != "assistant":
            messages = [*messages, {"role": "assistant", "content": self._answer(row)}]
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        return self._with_system(messages)

    def _read(self, row: dict[str, Any]) -> list[Message]:
        if row.get(self.messages_key) is not None:
            return _messages(row[self.messages_key], self.messages_key)
        return self._prompt(row)

    def _prompt(self, row: dict[str, Any]) -> list[Message]:
        prompt = _value(row, self.prompt_key)
        if not isinstance(prompt, str):
            return _messages(prompt, self.prompt_key)
        if not prompt.strip():
            raise BadRow(f"'{self.prompt_key}' is empty", "empty")
        try:
            text = self.prompt_format.format_map({**row, "prompt": prompt})
        except KeyError as error:
            raise BadRow(f"no key {error}, which data.prompt_format names; {_keys(row)}", "missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise BadRow(f"data.prompt_format {self.prompt_format!r} does not fit the row: {error}") from error
        return [{"role": "user", "content": text}]

    def _answer(self, row: dict[str, Any]) -> str:
        answer = _value(row, self.answer_key)
        if not isinstance(answer, str):
            raise BadRow(f"'{self.answer_key}' is {type(answer).__name__}; expected a string")
        if not answer.strip():
            raise BadRow(f"'{self.answer_key}' is empty", "empty")
        return answer

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if not any(_text(m).strip() for m in messages):
            raise BadRow("no message with a text", "empty")
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def prompt_text(messages: list[Message]) -> str:
    """A prompt as people read it: the one message, or who said what, one paragraph each."""
    spoken = [m for m in messages if m["role"] != "system"]
    if len(spoken) == 1:
        return _text(spoken[0])
    return "\n\n".join(f"{m['role']}: {_text(m)}" for m in spoken)


def _value(row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise BadRow(f"no key '{key}'; {_keys(row)}", "missing")
    if row[key] is None:
        raise BadRow(f"'{key}' is empty", "empty")
    return row[key]


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise BadRow(f"'{key}' is {type(value).__name__}; expected a string or a list of {{role, content}} messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise BadRow(f"'{key}': message {i} is not an object with role and content: {str(message)[:80]}")
    return value


def _text(message: Message) -> str:
    content = message["content"]
    return "".join(part.get("text") or "" for part in content) if isinstance(content, list) else content or ""


def _keys(row: dict[str, Any]) -> str:
    return f"the row has {', '.join(sorted(row)) or 'none'}"
