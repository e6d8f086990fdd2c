"""What rows of a prompt and responses to it have in common (preferences, labelled responses, judged steps)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coalign.data.examples import Example, Examples, learnable
from coalign.data.messages import Message
from coalign.data.sources import BadRow


class Responses(Examples):
    """Rows of which each gives one or more sequences that begin with the same prompt.

    The column ``prompt_length`` is the number of tokens that they share, so that the prompt can be computed once; the
    loss mask covers the assistant's turns after it. ``data.max_prompt_tokens`` bounds the prompt, ``data.max_tokens``
    prompt and response; where ``on_long`` is `truncate_left`, the prompt is cut, by the same number of tokens in all
    sequences of a row, and never a response.
    """

    longest = "max_tokens"

    @property
    def bound(self) -> str:
        prompt = f"{self.config.max_prompt_tokens} tokens of prompt"
        return prompt if self.max_tokens is None else f"{prompt} or {self.max_tokens} in all"

    def sequences(
        self, row: dict[str, Any], prompt: list[Message], responses: list[list[Message]], columns: list[dict[str, Any]]
    ) -> list[Example]:
        """One sequence for each response, with its ``columns``, ``index`` and ``prompt_length``."""
        tools = self.reader.tools(row)
        made = [
            up_to_the_last_trained(*self.template.conversation([*prompt, *said], tools, since=len(prompt)))
            for said in responses
        ]
        shared = shared_prompt(made)
        return [
            Example(tokens, dict(row), mask, {"index": i, "prompt_length": shared} | own)
            for i, ((tokens, mask), own) in enumerate(zip(made, columns, strict=True))
        ]

    def fit(self, examples: list[Example]) -> list[Example]:
        prompt = examples[0].columns["prompt_length"]
        response = max(len(example.tokens) for example in examples) - prompt
        room = self.config.max_prompt_tokens
        if self.max_tokens is not None:
            room = min(room, self.max_tokens - response)
        if prompt > room:
            bos = self.template.tokenizer.bos_token_id
            if self.policy["long"] != "truncate_left" or room < 1 + (examples[0].tokens[0] == bos):
                raise BadRow(f"{prompt} tokens of prompt, {response} of response; over {self.bound}", "long")
            examples = [example.cut_left(prompt - room, bos) for example in examples]
        return [learnable(example) for example in examples]


def up_to_the_last_trained(tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    """Without what a template writes after the last turn's end: generated responses end there, too, and a reward model
    reads its score from the last token. BadRow (empty) where nothing is trained."""
    if not any(mask):
        raise BadRow("a response without a token of the assistant", "empty")
    length = len(mask) - mask[::-1].index(True)
    return tokens[:length], mask[:length]


def shared_prompt(made: Iterable[tuple[list[int], list[bool]]]) -> int:
    """How many tokens all (tokens, loss mask) begin with before the first trained one of any."""
    prompts = [tokens[: mask.index(True)] for tokens, mask in made]
    differ = (i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    return next(differ, min(map(len, prompts)))
