"""From messages to tokens: a chat template applied the same way for prompts and for conversations to learn.

The template decides what is in the text, BOS included: its result is tokenised without adding special tokens. A
template is never guessed for a tokenizer that has none.

Sequences read as text: what reward functions, reward models and people see of a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError

from coalign.data.batch import Batch
from coalign.data.messages import Message, get_text
from coalign.data.sources import BadRow
from coalign.types import Sample, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


Messages = Sequence[Message]
Tools = list[dict[str, Any]]
Span = tuple[int, int]  # start and stop


class Template(Protocol):
    """How messages become tokens."""

    tokenizer: PreTrainedTokenizerBase
    jinja: str | None  # the template's text, if it is one

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """The tokens after which the model answers."""
        ...

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Tokens, and which of them are trained on: what the assistant says, and the end of its turns.

        Only in message ``since`` and later ones.
        """
        ...


def load_template(tokenizer: PreTrainedTokenizerBase, chat_template: str = "auto") -> Template:
    """The template that ``data.chat_template`` asks for: `auto`, `none`, a Jinja template or a file that holds one.

    Raises ValueError for a tokenizer without an end-of-sequence token, and with `auto` for one without a template.
    """
    if tokenizer.eos_token_id is None:
        name = tokenizer.name_or_path
        raise ValueError(
            f"tokenizer {name!r} has no eos_token, so no response could end; set it in tokenizer_config.json"
        )
    if chat_template == "none":
        return PlainText(tokenizer)
    return ChatTemplate(tokenizer, _jinja(tokenizer, chat_template))


class PlainText:
    """Text as it is: BOS if the tokenizer adds one, the prompt, then (for a conversation) the answer and EOS.

    Prompt and answer are tokenised apart, as in generation. One user message and at most one answer; BadRow for more.
    """

    jinja = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        if tools:
            raise BadRow("data.chat_template: none has no place for the row's tools; set a template")
        if [m["role"] for m in messages] != ["user"]:
            raise BadRow(
                f"data.chat_template: none takes a single user message, not {_roles(messages)}; set a template"
            )
        tokens = self.tokenizer(get_text(messages[0]), verbose=False)["input_ids"]
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        if tokens[:2] == [bos, bos]:
            tokens = tokens[1:]  # the text brought its own
        return tokens[:-1] if tokens[-1:] == [eos] else tokens

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0
    ) -> tuple[list[int], list[bool]]:
        prompt = self.prompt(messages[:-1], tools)
        answer = self.tokenizer(get_text(messages[-1]), add_special_tokens=False, verbose=False)["input_ids"]
        eos = self.tokenizer.eos_token_id
        if answer[-1:] != [eos]:  # the text may bring its own
            answer = [*answer, eos]
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)


class ChatTemplate:
    """A Jinja chat template.

    The mask comes from the template's ``{% generation %}`` blocks if it has them. Else each assistant turn lies between
    the rendering of what precedes it (with the generation prompt) and the rendering up to its end; a template for which
    one of these does not begin the whole conversation's text (it rewrites earlier turns) is refused with BadRow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, jinja: str) -> None:
        self.tokenizer = tokenizer
        self.jinja = jinja
        self._special = list_special_tokens(tokenizer)
        self._knows_tools = re.search(r"\btools\b", jinja) is not None
        self._marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", jinja) is not None

    def render(self, messages: Messages, tools: Tools | None = None, *, generation_prompt: bool = False) -> str:
        """The text. BadRow with the template's own words where it refuses the messages."""
        with _refusal(messages):
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=self._shown(tools),
                chat_template=self.jinja,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        return self._tokenize(self.render(messages, tools, generation_prompt=True))

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0
    ) -> tuple[list[int], list[bool]]:
        find = self._generation_blocks if self._marks_generation else self._assistant_turns
        text, spans = find(messages, tools, since)
        tokens = self._tokenize(text)
        mask = [False] * len(tokens)
        for start, stop in spans:
            first, last = self._position(tokens, text, start), self._position(tokens, text, stop)
            mask[first:last] = [True] * (last - first)
        if not any(mask) and any(m["role"] == "assistant" for m in messages[since:]):
            raise BadRow(
                "the chat template marks nothing of what the assistant says: its {% generation %} blocks are empty or "
                "left out; put them around the assistant's words in data.chat_template"
            )
        return self._end_turns(tokens, mask)

    def _generation_blocks(self, messages: Messages, tools: Tools | None, since: int) -> tuple[str, list[Span]]:
        """The text, and where its characters come from a generation block."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusal(messages):
            (text,), (spans,) = render_jinja_template(
                [list(messages)],
                tools=self._shown(tools),
                chat_template=self.jinja,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        if not since:
            return text, spans
        before = self._beginning(text, messages, tools, since)
        return text, [span for span in spans if span[0] >= before]

    def _assistant_turns(self, messages: Messages, tools: Tools | None, since: int) -> tuple[str, list[Span]]:
        """The text, and where its characters are the assistant's or end its turns."""
        text = self.render(messages, tools)
        spans = []
        for i, message in enumerate(messages[since:], since):
            if message["role"] != "assistant":
                continue
            if i == 0:
                raise BadRow("the conversation begins with the assistant")
            before = self.render(messages[:i], tools, generation_prompt=True)
            if not text.startswith(before):
                self._beginning(text, messages, tools, i)  # where that is at fault, it says so
                raise BadRow(
                    f"asked to answer, the chat template writes {before[-40:]!r}, but before the assistant's message "
                    f"{i} something else, so its tokens cannot be told from the rest; put {{% generation %}} blocks "
                    "into data.chat_template"
                )
            spans.append((len(before), self._beginning(text, messages, tools, i + 1)))
        return text, spans

    def _beginning(self, text: str, messages: Messages, tools: Tools | None, stop: int) -> int:
        """How many characters of the conversation's text are of its first ``stop`` messages."""
        if stop == len(messages):
            return len(text)
        beginning = self.render(messages[:stop], tools)
        if not text.startswith(beginning):
            raise BadRow(
                f"the chat template renders messages 0 to {stop - 1} differently when more follow, so the assistant's "
                "tokens cannot be told from the rest; put {% generation %} blocks into data.chat_template, or learn "
                "only the last turn (data.train_on: last)"
            )
        return len(beginning)

    def _shown(self, tools: Tools | None) -> Tools | None:
        if tools and not self._knows_tools:
            raise BadRow(
                "there are tools to describe, and the chat template has no place for them (it never reads `tools`): "
                "set data.chat_template to one that shows tools"
            )
        return tools

    def _position(self, tokens: list[int], text: str, characters: int) -> int:
        """How many tokens belong to the first characters; one that crosses the border belongs to what follows.

        Not from the tokenizer's character offsets: several tokens of one character (emoji) share them.
        """
        if characters == len(text):
            return len(tokens)
        return count_common_prefix(self._tokenize(text[:characters]), tokens)

    def _end_turns(self, tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """Trains the token that ends each turn and none after it; adds EOS where the last turn has no such token."""
        for start, stop in _runs(mask):
            last = max((t for t in range(start, stop) if tokens[t] in self._special), default=None)
            if last is not None and self._blank(tokens[last + 1 : stop]):
                mask[last + 1 : stop] = [False] * (stop - last - 1)
            elif stop < len(tokens) and tokens[stop] in self._special:
                mask[stop] = True
            elif self._blank(tokens[stop:]):
                return [*tokens[:stop], self.tokenizer.eos_token_id], [*mask[:stop], True]
        return tokens, mask

    def _blank(self, tokens: list[int]) -> bool:
        return not self.tokenizer.decode(tokens).strip()

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@contextmanager
def _refusal(messages: Messages) -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as error:
        raise BadRow(f"the chat template refuses the messages ({_roles(messages)}): {error}") from error


def _jinja(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> str:
    if chat_template == "auto":
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template: set data.chat_template to a Jinja "
                "template or a file that holds one, or to `none` for plain text"
            )
        return tokenizer.get_chat_template()
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise FileNotFoundError(
            f"data.chat_template: {chat_template!r} is neither `auto`, `none`, a Jinja template, nor a file that exists"
        )
    return path.read_text(encoding="utf-8")


def _roles(messages: Messages) -> str:
    return ", ".join(str(m["role"]) for m in messages) or "none"


def count_common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def list_special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of the special tokens, EOS among them."""
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.special} | {tokenizer.eos_token_id}


def _runs(mask: list[bool]) -> list[Span]:
    """Each run of True."""
    runs, start = [], 0
    for trained, run in groupby(mask):
        stop = start + len(list(run))
        if trained:
            runs.append((start, stop))
        start = stop
    return runs


def read_samples(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The batch (with ``prompt_length``) as Samples with their texts.

    ``prompt`` is as the model saw it, special tokens included; ``raw_response`` is all that follows, likewise.
    ``response`` is what the policy said last (of several turns, the last one), without special tokens. ``messages`` is
    the episode's conversation; of a single turn the row's (else the prompt as the user's words), with the response.
    """
    samples = batch.samples()
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    for sample, start in zip(samples, batch["prompt_length"].tolist(), strict=True):
        sample.prompt = decode(sample.tokens[:start])
        sample.raw_response = decode(sample.tokens[start:])
        sample.response = decode(sample.tokens[_last_turn(sample, start) :], skip_special_tokens=True)
        asked = sample.meta.get("messages") or [{"role": "user", "content": sample.prompt}]
        sample.messages = sample.messages or [*asked, {"role": "assistant", "content": sample.response}]
    return samples


def _last_turn(sample: Sample, start: int) -> int:
    """Where what the policy said last begins: after the last token that it did not choose."""
    given = (~sample.loss_mask[start:]).nonzero()
    return start + int(given[-1]) + 1 if len(given) and bool(sample.loss_mask[-1]) else start


def is_finished(status: Tensor) -> Tensor:
    """bool[N]: the sequences that can be judged; those that failed, or still go on, cannot."""
    return (status == Status.OK) | (status == Status.TRUNCATED)
