"""Interprets a row's keys: prompt, conversation, responses to compare, tools.

A row without the required values raises BadRow with the reason. Nothing is tokenised or dropped here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.images.placeholders import place_images, refuse_images
from coalign.data.messages import (
    Message,
    get_text,
    has_content,
    parse_json,
    parse_messages,
    parse_response,
    parse_tools,
    parse_transcript,
    replace_text,
    trim_to_assistant,
)
from coalign.data.sources import BadRow

if TYPE_CHECKING:
    from coalign.data.images.rows import RowImages

# Columns of well-known datasets: {our key: theirs}, used if a row has a value for each of theirs and for none of ours.
# Texts of several columns are joined as paragraphs; only the first of these columns is required.
CONVENTIONS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"messages": ("conversations",)},  # ShareGPT, OpenHermes
    {"prompt": ("question",), "answer": ("answer",)},  # GSM8K
    {"prompt": ("query",), "answer": ("response",)},  # MetaMathQA
    {"prompt": ("problem",), "answer": ("answer",)},  # MATH-500, DeepScaleR
    {"prompt": ("problem",), "answer": ("solution",)},  # MATH
    {"prompt": ("prompt",), "answer": ("completion",)},  # TRL
    {"prompt": ("instruction", "input", "context"), "answer": ("output",)},  # Alpaca
    {"prompt": ("instruction", "input", "context"), "answer": ("response",)},  # Dolly
    {"messages": ("messages",), "answer": ("ground_truth",)},  # Tulu 3, RLVR
    {"prompt": ("instruction", "input"), "chosen": ("chosen",), "rejected": ("rejected",)},  # LLaMA-Factory's pairs
    {"messages": ("messages",), "tools": ("functions",)},  # OpenAI's before `tools`
    {"prompt": ("prompt",), "steps": ("completions",), "labels": ("labels",)},  # PRM800K, Math-Shepherd as of TRL
    {"prompt": ("instruction",), "responses": ("completions.response",), "scores": ("completions.overall_score",)},
)  # (the last: UltraFeedback)

# Other names of missing keys, which an error proposes if the row has them.
SYNONYMS = {
    "prompt": ("question", "query", "instruction", "problem", "input", "user", "text"),
    "answer": ("completion", "output", "response", "solution", "ground_truth", "target", "generation"),
    "chosen": ("chosen_response", "preferred", "accepted", "response_chosen", "response_0", "response_a"),
    "rejected": ("rejected_response", "dispreferred", "response_rejected", "response_1", "response_b"),
    "text": ("content", "document", "raw_content"),
    "label": ("is_correct", "correct", "desirable", "kto_tag"),
    "steps": ("completions",),
}


class RowReader:
    """Reads the rows of one source by the run's keys, or by the source's own. ``images``: None reads text alone."""

    def __init__(self, config: DataConfig, source: SourceConfig, images: RowImages | None = None) -> None:
        self.config, self.images = config, images
        self.prompt_key = source.prompt_key or config.prompt_key
        self.answer_key = source.answer_key or config.answer_key
        self._names = source.keys

    def add_names(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add values under our names, by the ``keys`` of the source's configuration, else by CONVENTIONS."""
        values = {ours: _get_nested(row, theirs) for ours, theirs in self._names.items()}
        row = row | {ours: value for ours, value in values.items() if value is not None}
        conventions = _find_conventions(frozenset(key for key, value in row.items() if value is not None))
        row = row | next(filter(None, (_apply_convention(row, names) for names in conventions)), {})
        if self.images is not None:
            return self.images.read(row)
        refuse_images(row)
        return row

    def has(self, row: dict[str, Any], key: str) -> bool:
        """Whether the row has a value under ``key``; rows of tables have all columns, as None."""
        return row.get(key) is not None

    def value(self, row: dict[str, Any], key: str) -> Any:
        """Return a required value. BadRow (missing or empty) without it."""
        if key not in row:
            source_key = f" ({self._names[key]} in this source)" if key in self._names else ""
            synonym = next((name for name in SYNONYMS.get(key, ()) if name in row), None)
            hint = f"; if that is in '{synonym}', give the source `keys: {{{key}: {synonym}}}`" if synonym else ""
            raise BadRow(f"no key '{key}'{source_key}; {_describe_keys(row)}{hint}", "missing")
        if row[key] is None:
            raise BadRow(f"'{key}' is empty", "empty")
        return row[key]

    def tools(self, row: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the descriptions of the tools that the model may call, if the row has any."""
        key = self.config.tools_key
        return parse_tools(row[key], key) if self.has(row, key) else None

    def prompt(self, row: dict[str, Any]) -> list[Message]:
        """Return the messages to answer: the row's without the assistant's last ones, or its prompt."""
        messages = self._read(row)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self._format(messages, row)

    def reference(self, row: dict[str, Any]) -> Any | None:
        """Return the row's reference answer: under the answer key, or the assistant's last message."""
        if self.has(row, self.answer_key):
            return row[self.answer_key]
        last = self._read(row)[-1]
        return get_text(last) if last["role"] == "assistant" else None

    def conversation(self, row: dict[str, Any]) -> list[Message]:
        """Return the conversation to learn, up to the assistant's last message."""
        messages = self._read(row)
        if not self.has(row, self.config.messages_key) and messages and messages[-1]["role"] != "assistant":
            messages = [*messages, *parse_response(self.value(row, self.answer_key), self.answer_key)]
        return self._format(trim_to_assistant(messages), row)

    def answered(self, row: dict[str, Any]) -> tuple[list[Message], list[Message]]:
        """Return a prompt and its single response: the end of the row's messages, or the value of the answer key."""
        if self.has(row, self.answer_key) and not self.has(row, self.config.messages_key):
            prompt, (response,) = self.compared(row, {self.answer_key: row[self.answer_key]})
            return prompt, response
        messages = self._read(row)
        prompt = self.prompt(row)
        last = next((i for i, m in reversed(list(enumerate(messages))) if m["role"] != "assistant"), -1)
        if last + 1 == len(messages):
            self.value(row, self.answer_key)
        return prompt, trim_to_assistant(messages[last + 1 :])

    def compared(self, row: dict[str, Any], responses: Mapping[str, Any]) -> tuple[list[Message], list[list[Message]]]:
        """Return the prompt and its responses; ``responses`` maps their keys to their values.

        A response is a text, an assistant's message, or a list of messages. Lists that begin with the assistant follow
        the row's prompt. In complete conversations the prompt is the messages that all of them begin with, and the
        row's prompt key is ignored. BadRow for a mixture, and for conversations without a common beginning.
        """
        conversations_by_name = {name: self._find_conversation(row, name, value) for name, value in responses.items()}
        complete = [messages for messages in conversations_by_name.values() if messages]
        if not complete:
            answers = not self.has(row, self.prompt_key) and self.has(row, self.config.messages_key)
            prompt = self._format(self._read(row) if answers else self._prompt(row), row)
            if prompt[-1]["role"] == "assistant":
                raise BadRow(f"'{self.prompt_key}' ends with the assistant's words, so there is nothing to answer")
            return prompt, [trim_to_assistant(parse_response(value, name)) for name, value in responses.items()]
        if len(complete) < len(responses):
            raise BadRow(f"of {', '.join(responses)}, some are whole conversations and others only the response")
        conversations = [trim_to_assistant(messages) for messages in complete]
        shared = _count_shared(conversations)
        if not shared:
            raise BadRow(f"{', '.join(responses)} begin with different messages, so they answer no common prompt")
        return self._format(conversations[0][:shared], row), [c[shared:] for c in conversations]

    def _find_conversation(self, row: dict[str, Any], name: str, value: Any) -> list[Message] | None:
        """Return the value as a conversation, or None if it holds only a response."""
        if isinstance(value, str) and not self.has(row, self.prompt_key):
            return parse_transcript(value, name)
        if isinstance(value, list) and value:
            messages = self._parse(value, name, row)
            return messages if messages[0]["role"] in ("system", "user") else None
        return None

    def _read(self, row: dict[str, Any]) -> list[Message]:
        key = self.config.messages_key
        if not self.has(row, key):
            return self._prompt(row)
        return parse_transcript(row[key], key) if isinstance(row[key], str) else self._parse(row[key], key, row)

    def _parse(self, value: Any, key: str, row: dict[str, Any]) -> list[Message]:
        """Parse messages, the row's first among them, and insert the row's images."""
        if row.get("history") and key == self.prompt_key:
            raise BadRow(f"the row has 'history' and messages under '{key}'; name its turns in one of them")
        messages = parse_messages(value, key, images=self.images is not None)
        return messages if self.images is None else place_images(messages, row["images"], row["videos"])

    def _prompt(self, row: dict[str, Any]) -> list[Message]:
        prompt = self.value(row, self.prompt_key)
        if not isinstance(prompt, str):
            return self._parse(prompt, self.prompt_key, row)
        if not prompt.strip():
            raise BadRow(f"'{self.prompt_key}' is empty", "empty")
        messages = [*_read_history(row.get("history")), {"role": "user", "content": prompt}]
        return messages if self.images is None else place_images(messages, row["images"], row["videos"])

    def _format(self, messages: list[Message], row: dict[str, Any]) -> list[Message]:
        """Apply `data.prompt_format` to the last user message, and put the system message of the row's column
        `system`, or else `data.system`, first if there is none. BadRow if the row has two."""
        if not has_content(messages):
            raise BadRow("no message with a text", "empty")
        form = self.config.prompt_format
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
        if form != "{prompt}" and last is not None:
            try:
                values = {key: value for key, value in row.items() if value is not None}
                text = form.format_map(values | {"prompt": get_text(messages[last])})
            except KeyError as error:
                message = f"no key {error}, which data.prompt_format names; {_describe_keys(row)}"
                raise BadRow(message, "missing") from error
            except (ValueError, TypeError, AttributeError) as error:
                raise BadRow(f"data.prompt_format {form!r} does not fit the row: {error}") from error
            content = replace_text(messages[last], text)
            messages = [*messages[:last], messages[last] | {"content": content}, *messages[last + 1 :]]
        column = row.get("system") or ""
        if not isinstance(column, str):
            raise BadRow(f"'system' is {type(column).__name__}; expected the text of the system message")
        if messages[0]["role"] == "system":
            if column.strip() and column.strip() != get_text(messages[0]).strip():
                raise BadRow("the row has two system messages: under 'system', and first in its messages")
            return messages
        system = column if column.strip() else self.config.system
        return messages if system is None else [{"role": "system", "content": system}, *messages]


def _read_history(value: Any) -> list[Message]:
    """Read Alpaca's column `history`, a list of questions with their answers, as LLaMA-Factory has it."""
    turns = parse_json(value or [], "history")
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise BadRow(f"'history' is {str(value)[:80]!r}; expected a list of [question, answer]")
    said = [{"role": role, "content": text} for turn in turns for role, text in zip(_TURN, turn, strict=True)]
    return parse_messages(said, "history")


_TURN = ("user", "assistant")


@lru_cache(maxsize=256)
def _find_conventions(keys: frozenset[str]) -> list[dict[str, tuple[str, ...]]]:
    """Find the conventions that a row with values under these keys may follow: for most rows none, or one."""
    return [
        names
        for names in CONVENTIONS
        if not keys.intersection(_list_new(names))
        and all(theirs[0] in keys or theirs[0].partition(".")[0] in keys for theirs in names.values())
    ]


def _list_new(names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """List our names that a convention gives to columns of other names."""
    return [ours for ours, theirs in names.items() if theirs != (ours,)]


def _apply_convention(row: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return a row's values under our names by a convention; empty if the row lacks one of its required columns."""
    new = _list_new(names)
    values = {ours: [_get_nested(row, name) for name in theirs] for ours, theirs in names.items()}
    if any(column_values[0] is None for column_values in values.values()):
        return {}
    texts = {ours: [text for text in values[ours] if isinstance(text, str) and text] for ours in new}
    return {ours: "\n\n".join(texts[ours]) if texts[ours] else values[ours][0] for ours in new}


def _get_nested(row: dict[str, Any], name: str) -> Any | None:
    """Return ``row["a"]["b"]`` for "a.b", unless the row has a key of that name; None if there is no value.

    For a list of objects, the list of their values.
    """
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = [item.get(key) for item in value]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _count_shared(conversations: list[list[Message]]) -> int:
    """Count the messages that all conversations begin with, their last messages excluded."""
    limit = min(map(len, conversations)) - 1
    return next((i for i in range(limit) if any(c[i] != conversations[0][i] for c in conversations)), limit)


def _describe_keys(row: dict[str, Any]) -> str:
    return f"the row has {', '.join(sorted(row)) or 'none'}"
