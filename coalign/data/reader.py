"""From a row's keys to what they mean: prompt, conversation, responses to compare, tools.

It judges whether a row has what it needs (BadRow with the reason otherwise) and neither tokenises nor drops anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.messages import (
    Message,
    get_text,
    has_content,
    parse_messages,
    parse_response,
    parse_tools,
    parse_transcript,
    trim_to_assistant,
)
from coalign.data.sources import BadRow


class RowReader:
    """Reads the rows of one source by the run's keys, and those that the source names itself."""

    def __init__(self, config: DataConfig, source: SourceConfig) -> None:
        self.config = config
        self.prompt_key = source.prompt_key or config.prompt_key
        self.answer_key = source.answer_key or config.answer_key
        self._names = source.keys

    def named(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with what the source calls otherwise under our names as well."""
        found = {ours: _nested(row, theirs) for ours, theirs in self._names.items()}
        return row | {ours: value for ours, value in found.items() if value is not None}

    def has(self, row: dict[str, Any], key: str) -> bool:
        """Whether the row has something there; a table has every column in every row."""
        return row.get(key) is not None

    def value(self, row: dict[str, Any], key: str) -> Any:
        """What must be there. BadRow (missing or empty) if it is not."""
        if key not in row:
            its = f" ({self._names[key]} in this source)" if key in self._names else ""
            raise BadRow(f"no key '{key}'{its}; {_keys(row)}", "missing")
        if row[key] is None:
            raise BadRow(f"'{key}' is empty", "empty")
        return row[key]

    def tools(self, row: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The tools that the model may call, if the row describes any."""
        key = self.config.tools_key
        return parse_tools(row[key], key) if self.has(row, key) else None

    def prompt(self, row: dict[str, Any]) -> list[Message]:
        """What the model has to answer: the row's messages without the assistant's last ones, or its prompt."""
        messages = self._read(row)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self._asked(messages, row)

    def reference(self, row: dict[str, Any]) -> Any | None:
        """The answer that the row gives to its prompt: under the answer key, or in the assistant's last message."""
        if self.answer_key in row:
            return row[self.answer_key]
        last = self._read(row)[-1]
        return get_text(last) if last["role"] == "assistant" else None

    def conversation(self, row: dict[str, Any]) -> list[Message]:
        """What the model has to learn, up to the assistant's last message."""
        messages = self._read(row)
        if not self.has(row, self.config.messages_key) and messages and messages[-1]["role"] != "assistant":
            messages = [*messages, *parse_response(self.value(row, self.answer_key), self.answer_key)]
        return self._asked(trim_to_assistant(messages), row)

    def answered(self, row: dict[str, Any]) -> tuple[list[Message], list[Message]]:
        """A prompt and the one response to it: the end of the row's messages, or what stands under the answer key."""
        if self.has(row, self.answer_key) and not self.has(row, self.config.messages_key):
            prompt, (response,) = self.compared(row, {self.answer_key: row[self.answer_key]})
            return prompt, response
        messages = self._read(row)
        prompt = self.prompt(row)
        asked = next((i for i, m in reversed(list(enumerate(messages))) if m["role"] != "assistant"), -1)
        if asked + 1 == len(messages):
            self.value(row, self.answer_key)
        return prompt, trim_to_assistant(messages[asked + 1 :])

    def compared(self, row: dict[str, Any], said: Mapping[str, Any]) -> tuple[list[Message], list[list[Message]]]:
        """The prompt, and the responses to it: ``said`` under these names.

        Each is a text, an assistant's message, or a list of messages. Lists that begin with the assistant follow the
        row's prompt; whole conversations bring it: the messages with which all of them begin, whatever stands under
        the prompt's key. BadRow for a mixture, and for conversations that begin differently.
        """
        whole = {name: self._whole(row, name, value) for name, value in said.items()}
        if not any(whole.values()):
            prompt = self._asked(self._prompt(row), row)
            if prompt[-1]["role"] == "assistant":
                raise BadRow(f"'{self.prompt_key}' ends with the assistant's words, so there is nothing to answer")
            return prompt, [trim_to_assistant(parse_response(value, name)) for name, value in said.items()]
        if not all(whole.values()):
            raise BadRow(f"of {', '.join(said)}, some are whole conversations and others only the response")
        conversations = [trim_to_assistant(messages) for messages in whole.values()]
        shared = _shared(conversations)
        if not shared:
            raise BadRow(f"{', '.join(said)} begin with different messages, so they answer no common prompt")
        return self._asked(conversations[0][:shared], row), [c[shared:] for c in conversations]

    def _whole(self, row: dict[str, Any], name: str, value: Any) -> list[Message] | None:
        """The conversation, if it is one and not only its end."""
        if isinstance(value, str) and not self.has(row, self.prompt_key):
            return parse_transcript(value, name)
        if isinstance(value, list) and value:
            messages = parse_messages(value, name)
            return messages if messages[0]["role"] in ("system", "user") else None
        return None

    def _read(self, row: dict[str, Any]) -> list[Message]:
        key = self.config.messages_key
        return parse_messages(row[key], key) if self.has(row, key) else self._prompt(row)

    def _prompt(self, row: dict[str, Any]) -> list[Message]:
        prompt = self.value(row, self.prompt_key)
        if not isinstance(prompt, str):
            return parse_messages(prompt, self.prompt_key)
        if not prompt.strip():
            raise BadRow(f"'{self.prompt_key}' is empty", "empty")
        return [{"role": "user", "content": prompt}]

    def _asked(self, messages: list[Message], row: dict[str, Any]) -> list[Message]:
        """The messages with the run's system message, if they have none, and the last question as formatted."""
        if not has_content(messages):
            raise BadRow("no message with a text", "empty")
        if self.config.prompt_format != "{prompt}":
            last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
            if last is not None:
                text = self._formatted(get_text(messages[last]), row)
                messages = [*messages[:last], messages[last] | {"content": text}, *messages[last + 1 :]]
        if self.config.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.config.system}, *messages]

    def _formatted(self, prompt: str, row: dict[str, Any]) -> str:
        form = self.config.prompt_format
        try:
            return form.format_map({**row, "prompt": prompt})
        except KeyError as error:
            raise BadRow(f"no key {error}, which data.prompt_format names; {_keys(row)}", "missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise BadRow(f"data.prompt_format {form!r} does not fit the row: {error}") from error


def _nested(row: dict[str, Any], name: str) -> Any | None:
    """``row["a"]["b"]`` for "a.b", unless the row has a key of that very name; None where there is nothing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _shared(conversations: list[list[Message]]) -> int:
    """How many messages all begin with; the last one of each is never counted."""
    most = min(map(len, conversations)) - 1
    return next((i for i in range(most) if any(c[i] != conversations[0][i] for c in conversations)), most)


def _keys(row: dict[str, Any]) -> str:
    return f"the row has {', '.join(sorted(row)) or 'none'}"
