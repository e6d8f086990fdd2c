"""What an environment's messages add to the tokens of a conversation.

Only the difference is rendered and tokenised, behind a stand-in for what came before: tokens that were sampled, or that
are in the log already, are never made from text again.
"""

from __future__ import annotations

from typing import Any

from coalign.data.messages import Message
from coalign.data.templates import ChatTemplate, Template, Tools

_SAID = "stand-in"  # what the stand-in's assistant says


class RenderingError(ValueError):
    """The chat template does not say what a message adds."""


class Rendering:
    """Opening prompts and later messages as tokens, by the template that the data is rendered with."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.tokenizer: Any = template.tokenizer

    def opening(self, messages: list[Message], tools: Tools | None) -> list[int]:
        """The tokens after which the policy's first turn comes. BadRow where the template refuses."""
        return self.template.prompt(messages, tools)

    def text(self, text: str) -> list[int]:
        """A text as it is."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def following(self, answer: list[int], messages: list[Message], tools: Tools | None) -> list[int]:
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
        alone = template.render(_stand_in([]), tools)
        end = alone[alone.rindex(_SAID) + len(_SAID) :]
        before = template.render(_stand_in(messages), tools)
        after = template.render(_stand_in(messages) + messages, tools, generation_prompt=True)
        if not after.startswith(before):
            raise RenderingError(
                "the chat template renders earlier turns differently when more messages follow, so what they add to "
                "the tokens is not defined; set data.chat_template to one that leaves earlier turns as they are"
            )
        ending = self.text(end)
        missing = ending[ending.index(answer[-1]) + 1 :] if answer and answer[-1] in ending else ending
        return missing + self.text(after[len(before) :])


def _stand_in(messages: list[Message]) -> list[Message]:
    """A conversation that ``messages`` may follow: with a call for each result of a tool among them."""
    answer: Message = {"role": "assistant", "content": _SAID}
    results = [m for m in messages if m["role"] == "tool"]
    if results:
        answer["tool_calls"] = [
            {
                "id": result.get("tool_call_id", f"call{i:05d}"),
                "type": "function",
                "function": {"name": result.get("name", "tool"), "arguments": {}},
            }
            for i, result in enumerate(results)
        ]
    return [{"role": "user", "content": "-"}, answer]
