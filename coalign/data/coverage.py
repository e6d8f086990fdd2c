"""Checks that a chat template writes the contents, roles, calls and reasoning of messages, each exactly once.

Templates silently leave out what they do not support. Whether they do depends on the form of a conversation (its roles
and the keys of its messages), not on its words. So each form is rendered once, with stand-ins for all texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from coalign.data.messages import KEYS, REASONING_KEYS, Message, is_learned, split_reasoning
from coalign.data.sources import BadRow

MAX_FORMS = 4096  # verdicts that are kept
_UNKNOWN_ROLE = "qzroleqz"  # no template has it
# The content of a tool's result, which templates distinguish from a question.
_ENCLOSED = re.compile(r"\s*<([\w|]+)>.*</\1>\s*", re.DOTALL)

Render = Callable[[list[Message]], str]


@dataclass(frozen=True, slots=True)
class _StandIn:
    """A text that replaces one of message ``index``; ``what`` says which."""

    text: str
    index: int
    what: str


class CoverageCheck:
    """Checks the text that a template writes, and keeps the verdict on each form of a conversation.

    ``name`` is the template's name in error messages, ``jinja`` its text.
    """

    def __init__(self, name: str, jinja: str) -> None:
        self.name, self.jinja = name, jinja
        self._verdicts: dict[Hashable, str | None] = {}

    def check(
        self, messages: Sequence[Message], render: Render, *, form: Hashable, since: int, learned: int | None
    ) -> None:
        """Raise BadRow if ``render`` leaves out something of the messages from ``since`` on, or writes it twice.

        Reasoning must be written in answers from message ``learned`` on; elsewhere templates drop it on purpose.
        ``form`` is everything beside the messages that rendering depends on.
        """
        key = (form, since, learned, *map(_describe_form, messages))
        if key not in self._verdicts:
            if len(self._verdicts) >= MAX_FORMS:
                self._verdicts.clear()
            self._verdicts[key] = next(self._find_faults(messages, render, since, learned), None)
        if (fault := self._verdicts[key]) is not None:
            raise BadRow(fault)

    def _find_faults(
        self, messages: Sequence[Message], render: Render, since: int, learned: int | None
    ) -> Iterator[str]:
        for i, message in enumerate(messages[since:], since):
            if unknown := list_unknown_keys(message, self.jinja):
                yield (
                    f"message {i} of role '{message['role']}' has {', '.join(unknown)}, which neither Coalign nor "
                    f"{self.name} reads; remove or rename that"
                )
        standing, expected = _write_stand_ins(messages)
        try:
            text = render(standing)
        except BadRow:  # the messages themselves were rendered: this template depends on their words
            return
        for stand_in in expected:
            i, times = stand_in.index, text.count(stand_in.text)
            if i < since or times == 1 or (times and stand_in.what.startswith("call")):
                continue
            if times:
                yield f"{self.name} writes the {stand_in.what} of {_name(messages, i)} {times} times"
            elif stand_in.what == "reasoning":
                if learned is not None and i >= learned and is_learned(messages[i]):
                    yield (
                        f"the chat template leaves out the reasoning of message {i}, which is learned; drop it "
                        "(data.reasoning: drop), or take a template that shows it"
                    )
            elif learned is not None or not _is_dropped_later(standing, stand_in, render):
                yield (
                    f"{self.name} leaves out the {stand_in.what} of {_name(messages, i)}; give the message another "
                    "role or form, or set data.chat_template to a template that writes it"
                )
        for i, message in enumerate(messages[since:], since):
            if _loses_role(standing, i, text, render):
                yield (
                    f"{self.name} has no form for the role '{message['role']}' of message {i}, and writes it as that "
                    "of another; rename the role, or set data.chat_template to a template that knows it"
                )


def list_unknown_keys(message: Message, jinja: str = "") -> list[str]:
    """List the keys of a message that have a value, and that neither this package nor the template reads."""
    keys = [key for key, value in message.items() if key not in KEYS and value not in (None, "", [], {})]
    return [f"'{key}'" for key in keys if not re.search(rf"\b{re.escape(key)}\b", jinja)]


def _write_stand_ins(messages: Sequence[Message]) -> tuple[list[Message], list[_StandIn]]:
    """Return the messages with stand-ins for all of their texts, and the stand-ins."""
    expected: list[_StandIn] = []
    numbers = count()

    def stand(index: int, what: str) -> str:
        expected.append(_StandIn(f"qz{next(numbers)}qz", index, what))
        return expected[-1].text

    return [_replace_texts(message, lambda what, i=i: stand(i, what)) for i, message in enumerate(messages)], expected


def _replace_texts(message: Message, stand: Callable[[str], str]) -> Message:
    content = message["content"]
    if isinstance(content, list):
        replaced: Any = [
            part | {"text": stand("content")} if (part.get("text") or "").strip() else part for part in content
        ]
    elif message["role"] == "assistant" and "</think>" in content:
        replaced = _replace_block(message, stand)
    elif enclosed := _ENCLOSED.fullmatch(content):
        replaced = f"<{enclosed[1]}>{stand('content')}</{enclosed[1]}>"
    else:
        replaced = stand("content") if content.strip() else content
    reasoning = {key: stand("reasoning") for key in REASONING_KEYS if key in message}
    calls = [_replace_call(call, i, stand) for i, call in enumerate(message.get("tool_calls") or [])]
    return message | {"content": replaced} | reasoning | ({"tool_calls": calls} if calls else {})


def _replace_block(message: Message, stand: Callable[[str], str]) -> str:
    reasoning, rest = split_reasoning({"role": "assistant", "content": message["content"]})
    block = f"<think>\n{stand('reasoning')}\n</think>\n\n" if reasoning else "<think>\n\n</think>\n\n"
    return block + (stand("content") if rest["content"].strip() else "")


def _replace_call(call: dict[str, Any], number: int, stand: Callable[[str], str]) -> dict[str, Any]:
    function = call.get("function", call)
    said: dict[str, Any] = {"name": stand(f"call {number} (its name)")}
    if function["arguments"]:
        said["arguments"] = {stand(f"arguments of call {number}"): stand(f"arguments of call {number}")}
    return call | ({"function": function | said} if "function" in call else said)


def _describe_form(message: Message) -> Hashable:
    """Describe the form of a message: everything but its words that decides how templates write it."""
    content = message["content"]
    if isinstance(content, list):
        shape: Hashable = tuple((part.get("type"), bool((part.get("text") or "").strip())) for part in content)
    elif message["role"] == "assistant" and "</think>" in content:
        reasoning, rest = split_reasoning({"role": "assistant", "content": content})
        shape = (bool(reasoning), bool(rest["content"].strip()))
    else:
        enclosed = _ENCLOSED.fullmatch(content)
        shape = enclosed[1] if enclosed else bool(content.strip())
    calls = tuple(bool(call.get("function", call)["arguments"]) for call in message.get("tool_calls") or [])
    filled = tuple(sorted(key for key, value in message.items() if value not in (None, "", [], {})))
    return message["role"], shape, calls, tuple(sorted(message)), filled, is_learned(message)


def _is_dropped_later(messages: Sequence[Message], stand_in: _StandIn, render: Render) -> bool:
    """Whether a template writes the content beside a call only until an answer follows, as gpt-oss' does on purpose."""
    if stand_in.what != "content" or not messages[stand_in.index].get("tool_calls"):
        return False
    try:
        return stand_in.text in render(list(messages[: stand_in.index + 1]))
    except BadRow:
        return False


def _loses_role(messages: Sequence[Message], index: int, text: str, render: Render) -> bool:
    """Whether a template writes a message as it would an unknown role, and as it would one of another role."""
    role = messages[index]["role"]
    if role in ("user", "assistant") or not messages[index]["content"]:
        return False

    def is_same(candidate: str) -> bool:
        try:
            return render([m | {"role": candidate} if i == index else m for i, m in enumerate(messages)]) == text
        except BadRow:
            return False

    roles = ("user", "assistant") if role in ("system", "tool") else ("user", "assistant", "system")
    return is_same(_UNKNOWN_ROLE) and any(map(is_same, roles))


def _name(messages: Sequence[Message], index: int) -> str:
    return f"message {index} of role '{messages[index]['role']}'"
