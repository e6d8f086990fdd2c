"""What an environment's messages add to the tokens of a conversation.

Only the difference is rendered and tokenised, behind a stand-in for what came before: tokens that were sampled, or that
are in the log already, are never made from text again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coalign.data.messages import Message
from coalign.data.templates import ChatTemplate, Template, Tools, count_common_prefix, list_special_tokens

_SAID = "stand-in"
# Some templates (Qwen3's) render an answer without reasoning in another way once it is no longer the last message.
_ANSWERS = (_SAID, f"<think>\n{_SAID}\n</think>\n\n{_SAID}")


def call_id(number: int) -> str:
    """Of a tool call by its number in a turn: nine letters and digits, which the strictest templates ask for."""
    return f"call{number:05d}"


class RenderingError(ValueError):
    """The chat template does not say what a message adds."""


class Rendering:
    """Opening prompts and later messages as tokens, by the template that the data is rendered with."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.tokenizer: Any = template.tokenizer
        self._special = list_special_tokens(self.tokenizer)

    def opening(self, messages: list[Message], tools: Tools | None) -> list[int]:
        """The tokens after which the policy's first turn comes. BadRow where the template refuses."""
        return self.template.prompt(messages, tools)

    def text(self, text: str) -> list[int]:
        """A text as it is."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def following(self, answer: Sequence[int], messages: list[Message], tools: Tools | None) -> list[int]:
        """What comes between the policy's turn ``answer`` and its next one, when ``messages`` are said.

        First what the template puts at the end of an assistant's turn and the answer does not hold yet, then the
        messages, then the generation prompt. Raises RenderingError where these are not defined.
        """
        template = self.template
        if not isinstance(template, ChatTemplate):
            raise RenderingError(
                "data.chat_template: none has no form for a second message; set a template (or append plain text with "
                "`episode.write`)"
            )
        for said in _ANSWERS:
            before = self.text(template.render(_stand_in(said, messages), tools))
            after = self.text(template.render(_stand_in(said, messages) + messages, tools, generation_prompt=True))
            same = count_common_prefix(before, after)
            if self._ends_a_text(before[same:]):
                return self._continued(list(answer), self._ending(before[:same], tools), after[same:])
        raise RenderingError(
            "the chat template renders earlier turns differently when more messages follow, so what they add to the "
            "tokens is not defined; set data.chat_template to one that leaves earlier turns as they are"
        )

    def _ends_a_text(self, tokens: Sequence[int]) -> bool:
        """Whether there is nothing but what a template may put at the end of everything (an end-of-text token)."""
        return not self.tokenizer.decode([t for t in tokens if t not in self._special]).strip()

    def _ending(self, before: list[int], tools: Tools | None) -> list[int]:
        """How the assistant's turn ends at the end of ``before``, after what is said in it."""
        text = self.template.render(_stand_in(_SAID, []), tools)
        usual = self.text(text[text.rindex(_SAID) + len(_SAID) :])
        length = max(n for n in range(len(usual) + 1) if before[len(before) - n :] == usual[:n])
        return usual[:length]

    def _continued(self, answer: list[int], ending: list[int], added: list[int]) -> list[int]:
        """``ending`` and ``added`` without what the answer has of them. Its last token, if it is a special one, ends
        the turn whether or not it is the template's (a tool call may have one of its own)."""
        if not answer or answer[-1] not in self._special:
            return ending + added
        if answer[-1] in ending:
            return ending[ending.index(answer[-1]) + 1 :] + added
        if added[:1] == answer[-1:]:  # the end of a turn is the beginning of the next one's header
            return added[1:]
        last = max((i for i, token in enumerate(ending) if token in self._special), default=-1)
        return ending[last + 1 :] + added


def _stand_in(said: str, messages: list[Message]) -> list[Message]:
    """A conversation that ``messages`` may follow: with a call for each result of a tool among them."""
    answer: Message = {"role": "assistant", "content": said}
    results = [m for m in messages if m["role"] == "tool"]
    if results:
        answer["tool_calls"] = [
            {
                "id": result.get("tool_call_id", call_id(i)),
                "type": "function",
                "function": {"name": result.get("name", "tool"), "arguments": {}},
            }
            for i, result in enumerate(results)
        ]
    return [{"role": "user", "content": "-"}, answer]
