"""Chat templates: from messages to tokens and loss masks, and back from sequences to text.

The template decides what the text contains, BOS included: the rendered text is tokenised without adding special tokens.
A tokenizer without a template never gets a guessed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from coalign.data.batch import Batch
from coalign.data.messages import ContentGuard, Message, check_length, get_text
from coalign.data.sources import BadRow
from coalign.types import Sample, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


Messages = Sequence[Message]
Tools = list[dict[str, Any]]
Span = tuple[int, int]  # start and stop


def load_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str = "auto", *, keep_special_tokens: bool = False
) -> Template:
    """Load what ``data.chat_template`` names: `auto`, `none`, a Jinja template or a file that holds one.

    ``keep_special_tokens``: a special token that a message spells is that token, not text (see ContentGuard).
    ValueError if the tokenizer has no end-of-sequence token or, with `auto`, no template.
    """
    if tokenizer.eos_token_id is None:
        name = tokenizer.name_or_path
        raise ValueError(
            f"tokenizer {name!r} has no eos_token, so no response could end; set it in tokenizer_config.json"
        )
    if chat_template == "none":
        return PlainText(tokenizer, keep_special_tokens=keep_special_tokens)
    return ChatTemplate(tokenizer, _jinja(tokenizer, chat_template), keep_special_tokens=keep_special_tokens)


class PlainText:
    """Uses the text as it is: BOS if the tokenizer adds one, the prompt, then (for a conversation) the answer and EOS.

    Prompt and answer are tokenised separately, as in generation. BadRow unless there is one user message, followed by
    at most one answer.
    """

    jinja: str | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keep_special_tokens: bool = False) -> None:
        self.tokenizer, self.guard = tokenizer, ContentGuard(tokenizer, keep=keep_special_tokens)

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """Return the tokens that the model continues with its answer."""
        if tools:
            raise BadRow("data.chat_template: none has no place for the row's tools; set a template")
        if [m["role"] for m in messages] != ["user"]:
            raise BadRow(
                f"data.chat_template: none takes a single user message, not {_roles(messages)}; set a template"
            )
        tokens, bos = self.guard.read(get_text(messages[0]), special=True), get_bos(self.tokenizer)
        if tokens[:2] == [bos, bos]:
            tokens = tokens[1:]  # the text contains its own BOS
        return tokens[:-1] if tokens[-1:] == [get_eos(self.tokenizer)] else tokens

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return tokens and a loss mask: the assistant's words and the ends of its turns, from message ``since`` on.

        BadRow if the template cannot represent the messages.
        """
        prompt = self.prompt(messages[:-1], tools)
        answer, eos = self.guard.read(get_text(messages[-1])), get_eos(self.tokenizer)
        if answer[-1:] != [eos]:  # the text may contain its own EOS
            answer = [*answer, eos]
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)


class ChatTemplate:
    """Applies a Jinja chat template.

    The loss mask comes from the template's ``{% generation %}`` blocks if it has them. Otherwise each assistant turn is
    found by rendering what precedes it (with the generation prompt) and everything up to its end. BadRow if one of
    these texts does not begin the whole conversation's text, because the template rewrites earlier turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, jinja: str, *, keep_special_tokens: bool = False) -> None:
        self.tokenizer, self.guard = tokenizer, ContentGuard(tokenizer, keep=keep_special_tokens)
        self.jinja = jinja
        self._special = list_special_tokens(tokenizer)
        self._knows_tools = reads_tools(jinja)
        self._marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", jinja) is not None

    def render(self, messages: Messages, tools: Tools | None = None, *, generation_prompt: bool = False) -> str:
        """Render the text of protected messages. BadRow with the template's own message if it refuses them."""
        with _refuse_errors(messages):
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=cast(Any, self._check_tools(tools)),  # a list is invariant, and theirs admits callables
                chat_template=self.jinja,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        return check_length(cast(str, text))

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        messages, tools = self.guard.protect((messages, tools))
        return self.guard.tokenize(self.render(messages, tools, generation_prompt=True))

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0
    ) -> tuple[list[int], list[bool]]:
        messages, tools = self.guard.protect((messages, tools))
        find = self._generation_blocks if self._marks_generation else self._assistant_turns
        text, spans = find(messages, tools, since)
        tokens = self.guard.tokenize(text)
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
        """Render the text, with the character spans of its generation blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refuse_errors(messages):
            special: dict[str, Any] = self.tokenizer.special_tokens_map
            (text,), found = render_jinja_template(
                [list(messages)],
                tools=cast(Any, self._check_tools(tools)),
                chat_template=self.jinja,
                return_assistant_tokens_mask=True,
                **special,
            )
        (spans,) = cast(list[list[Span]], found)
        if not since:
            return text, spans
        before = self._find_beginning(text, messages, tools, since)
        return text, [span for span in spans if span[0] >= before]

    def _assistant_turns(self, messages: Messages, tools: Tools | None, since: int) -> tuple[str, list[Span]]:
        """Render the text, with the character spans of the assistant's words and ends of turns."""
        text = self.render(messages, tools)
        spans = []
        for i, message in enumerate(messages[since:], since):
            if message["role"] != "assistant":
                continue
            if i == 0:
                raise BadRow("the conversation begins with the assistant")
            before = self.render(messages[:i], tools, generation_prompt=True)
            if not text.startswith(before):
                self._find_beginning(text, messages, tools, i)  # raises if earlier messages are rendered differently
                raise BadRow(
                    f"asked to answer, the chat template writes {before[-40:]!r}, but before the assistant's message "
                    f"{i} something else, so its tokens cannot be told from the rest; put {{% generation %}} blocks "
                    "into data.chat_template"
                )
            spans.append((len(before), self._find_beginning(text, messages, tools, i + 1)))
        return text, spans

    def _find_beginning(self, text: str, messages: Messages, tools: Tools | None, stop: int) -> int:
        """Count the characters of the conversation's text that belong to its first ``stop`` messages."""
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

    def _check_tools(self, tools: Tools | None) -> Tools | None:
        if tools and not self._knows_tools:
            raise BadRow(
                "there are tools to describe, and the chat template has no place for them (it never reads `tools`): "
                "set data.chat_template to one that shows tools"
            )
        return tools

    def _position(self, tokens: list[int], text: str, characters: int) -> int:
        """Count the tokens of the first ``characters``; a token across the border belongs to the text after it.

        The tokenizer's character offsets cannot tell: several tokens of one character (emoji) share them.
        """
        if characters == len(text):
            return len(tokens)
        return count_common_prefix(self.guard.tokenize(text[:characters]), tokens)

    def _end_turns(self, tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """Train the token that ends each turn, and none after it; add EOS if the last turn has no such token."""
        for start, stop in _runs(mask):
            last = max((t for t in range(start, stop) if tokens[t] in self._special), default=None)
            if last is not None and self._is_blank(tokens[last + 1 : stop]):
                mask[last + 1 : stop] = [False] * (stop - last - 1)
            elif stop < len(tokens) and tokens[stop] in self._special:
                mask[stop] = True
            elif self._is_blank(tokens[stop:]):
                return [*tokens[:stop], get_eos(self.tokenizer)], [*mask[:stop], True]
        return tokens, mask

    def _is_blank(self, tokens: list[int]) -> bool:
        return not cast(str, self.tokenizer.decode(tokens)).strip()


Template = PlainText | ChatTemplate


@contextmanager
def _refuse_errors(messages: Messages) -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as error:
        raise BadRow(f"the chat template refuses the messages ({_roles(messages)}): {error}") from error


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Tensor | list[int], *, skip_special: bool = False) -> str:
    """Decode tokens to exactly the text that they stand for."""
    text = tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    return cast(str, text)


def get_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return cast("int | None", tokenizer.bos_token_id)


def get_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    return cast(int, tokenizer.eos_token_id)  # `load_template` refuses a tokenizer without one


def _jinja(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> str:
    if chat_template == "auto":
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template: set data.chat_template to a Jinja "
                "template or a file that holds one, or to `none` for plain text"
            )
        return tokenizer.get_chat_template()
    return read_template(chat_template)


def reads_tools(jinja: str) -> bool:
    """Whether a Jinja template has a place for the descriptions of tools."""
    return re.search(r"\btools\b", jinja) is not None


def read_template(chat_template: str) -> str:
    """Return the Jinja template that ``data.chat_template`` is, or that its file holds. FileNotFoundError."""
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
    """Length of the longest common prefix of two token lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def list_special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Collect the ids of the special tokens, EOS included."""
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.special} | {get_eos(tokenizer)}


def _runs(mask: list[bool]) -> list[Span]:
    """Spans of consecutive True values."""
    runs, start = [], 0
    for trained, run in groupby(mask):
        stop = start + len(list(run))
        if trained:
            runs.append((start, stop))
        start = stop
    return runs


def read_samples(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return the sequences of a batch (with ``prompt_length``) as Samples with their texts.

    ``prompt`` is what the model saw, special tokens included; ``raw_response`` is all that follows, likewise.
    ``response`` is the policy's last turn without special tokens. ``messages`` is the episode's conversation; for a
    single turn the row's messages (or else the prompt as the user's) and the response.
    """
    samples = batch.samples()
    for sample, start in zip(samples, batch["prompt_length"].tolist(), strict=True):
        sample.prompt = decode(tokenizer, sample.tokens[:start])
        sample.raw_response = decode(tokenizer, sample.tokens[start:])
        sample.response = decode(tokenizer, sample.tokens[_find_last_turn(sample, start) :], skip_special=True)
        prompt = sample.meta.get("messages") or [{"role": "user", "content": sample.prompt}]
        sample.messages = sample.messages or [*prompt, {"role": "assistant", "content": sample.response}]
    return samples


def _find_last_turn(sample: Sample, start: int) -> int:
    """Position at which the policy's last turn begins: after the last token that it did not generate."""
    external = (~sample.loss_mask[start:]).nonzero()
    return start + int(external[-1]) + 1 if len(external) and bool(sample.loss_mask[-1]) else start


def is_finished(status: Tensor) -> Tensor:
    """bool[N]: whether a sequence can be scored; failed and unfinished ones cannot."""
    return (status == Status.OK) | (status == Status.TRUNCATED)
