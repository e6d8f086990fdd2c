"""Turns an environment's messages into the tokens that they add to a conversation.

Only the difference is rendered and tokenised, after a placeholder for the conversation so far. Tokens that are sampled
or logged already are never made from text again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

from coalign.data.images.placeholders import read_part
from coalign.data.images.rows import RowImages
from coalign.data.messages import ContentGuard, Message, parse_messages
from coalign.data.templates import (
    ChatTemplate,
    Template,
    Tools,
    count_common_prefix,
    list_special_tokens,
    locate_images,
)
from coalign.types import ImageSpan

_PLACEHOLDER = "stand-in"
# Some templates (Qwen3's) change how they render an answer without reasoning once another message follows it.
_ANSWERS = (_PLACEHOLDER, f"<think>\n{_PLACEHOLDER}\n</think>\n\n{_PLACEHOLDER}")


def format_call_id(number: int) -> str:
    """The id of a turn's n-th tool call: nine letters and digits, as the strictest templates require."""
    return f"call{number:05d}"


class RenderingError(ValueError):
    """The chat template does not define what a message adds."""


class Rendering:
    """Renders prompts and later messages as tokens, with the template that the data is rendered with."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.tokenizer: Any = template.tokenizer
        self.guard = template.guard
        self._unguarded = copy.copy(template)
        self._unguarded.guard = ContentGuard(self.tokenizer, keep=True)
        self._special = list_special_tokens(self.tokenizer)

    def read_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Validate messages as in rows (see `parse_messages`), and replace images (data URLs, bytes) by paths.

        Raises RenderingError for images in a run that reads text alone, BadRow (image) for one that cannot be used, and
        BadRow for anything that is no message.
        """
        if self.template.placeholders is not None:
            read = RowImages(self.template.placeholders.files).read_messages(list(messages))
            return parse_messages(read, "messages", images=True)
        parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
        if any(isinstance(part, dict) and read_part(part) is not None for part in parts):
            raise RenderingError("the environment shows an image, and the run reads text alone; set data.images: {}")
        return parse_messages(list(messages), "messages")

    def render_prompt(
        self, messages: list[Message], tools: Tools | None, keep_special_tokens: bool
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return the tokens before the first turn, and the spans of images in them.

        ``keep_special_tokens``: messages may write special tokens.
        """
        tokens = (self._unguarded if keep_special_tokens else self.template).prompt(messages, tools)
        return tokens, locate_images(self.template, tokens, messages)

    def rewrites(self, messages: Sequence[Message]) -> bool:
        """Whether `data.reasoning` removes earlier reasoning when ``messages`` follow. RenderingError if it cannot."""
        policy = self.template.reasoning
        if policy in (None, "keep") or not any(policy == "drop" or m["role"] == "user" for m in messages):
            return False
        if "</think>" not in (self.template.jinja or ""):
            raise RenderingError(
                f"data.reasoning: {policy} removes what ends with </think> from earlier turns, and the chat template "
                "writes no such block; set data.reasoning: keep"
            )
        return True

    def render_messages(
        self, answer: Sequence[int], messages: list[Message], tools: Tools | None
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return the tokens between the policy's turn ``answer`` and its next one, and the spans of images in them.

        They are the end of an assistant's turn, as far as the answer lacks it, then ``messages``, then the generation
        prompt. Raises RenderingError if the template does not define them.
        """
        template = self.template
        if not isinstance(template, ChatTemplate):
            raise RenderingError(
                "data.chat_template: none has no form for a second message; set a template (or append plain text with "
                "`episode.write`)"
            )
        messages, tools = self.guard.protect((messages, tools))
        conversation = _placeholder_conversation(_PLACEHOLDER, messages)
        template.check_coverage([*conversation, *messages], tools, since=len(conversation), generation_prompt=True)
        if rendered := self._find_added(template, messages, tools):
            tokens = self._join(list(answer), *rendered)
            return tokens, locate_images(template, tokens, messages)
        alternatives = (
            words
            for words, alternative in template.list_alternatives()
            if self._find_added(alternative, messages, tools)
        )
        raise RenderingError(
            "the chat template renders earlier turns differently when more messages follow, so what they add to the "
            "tokens is not defined; set data.chat_template to one that leaves earlier turns as they are"
            + "".join(f", for example {words}" for words in islice(alternatives, 1))
        )

    def _find_added(
        self, template: ChatTemplate, messages: list[Message], tools: Tools | None
    ) -> tuple[list[int], list[int]] | None:
        """Find the end of an assistant's turn before ``messages``, and the tokens that these add. None if they vary."""
        for answered in _ANSWERS:
            conversation = _placeholder_conversation(answered, messages)
            short = template.render(conversation, tools)
            long = template.render(conversation + messages, tools, generation_prompt=True)
            # Tokens from a special token on do not depend on what precedes it, such as descriptions of many tools.
            cut = self.guard.find_marker(short, max(0, short.find(_PLACEHOLDER)))
            cut = cut if long.startswith(short[:cut]) else 0
            without, followed = self.guard.tokenize(short[cut:]), self.guard.tokenize(long[cut:])
            shared = count_common_prefix(without, followed)
            if self._is_end_of_text(without[shared:]):
                return self._find_ending(template, without[:shared], tools), followed[shared:]
        return None

    def _is_end_of_text(self, tokens: Sequence[int]) -> bool:
        """Whether these are only tokens that a template may put at the very end (an end-of-text token)."""
        return not self.tokenizer.decode([t for t in tokens if t not in self._special]).strip()

    def _find_ending(self, template: ChatTemplate, conversation: list[int], tools: Tools | None) -> list[int]:
        """Return the tokens with which the template ends the assistant's turn at the end of ``conversation``."""
        text = template.render(_placeholder_conversation(_PLACEHOLDER, []), tools)
        usual = self.guard.tokenize(text[text.rindex(_PLACEHOLDER) + len(_PLACEHOLDER) :])
        length = max(n for n in range(len(usual) + 1) if conversation[len(conversation) - n :] == usual[:n])
        return usual[:length]

    def _join(self, answer: list[int], ending: list[int], added: list[int]) -> list[int]:
        """Join ``ending`` and ``added`` without the tokens that the answer already ends with.

        If the answer's last token is a special one, it ends the turn, even if it is not the template's (tool calls may
        end with another one).
        """
        if not answer or answer[-1] not in self._special:
            return ending + added
        if answer[-1] in ending:
            return ending[ending.index(answer[-1]) + 1 :] + added
        if added[:1] == answer[-1:]:  # the end of a turn is the beginning of the next one's header
            return added[1:]
        last = max((i for i, token in enumerate(ending) if token in self._special), default=-1)
        return ending[last + 1 :] + added


def _placeholder_conversation(answered: str, messages: list[Message]) -> list[Message]:
    """A placeholder conversation that ``messages`` may follow, with a tool call for each tool result in them."""
    answer: Message = {"role": "assistant", "content": answered}
    results = [m for m in messages if m["role"] == "tool"]
    if results:
        answer["tool_calls"] = [
            {
                "id": result.get("tool_call_id", format_call_id(i)),
                "type": "function",
                "function": {"name": result.get("name", "tool"), "arguments": {}},
            }
            for i, result in enumerate(results)
        ]
    return [{"role": "user", "content": "-"}, answer]
