"""Chat templates: from messages to tokens and loss masks, and back from sequences to text.

The template decides what the text contains, BOS included: the rendered text is tokenised without adding special tokens.
A tokenizer without a template never gets a guessed one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes

from coalign.config.errors import suggest
from coalign.data.batch import Batch
from coalign.data.coverage import CoverageCheck, list_unknown_keys
from coalign.data.images.placeholders import is_image, shift
from coalign.data.messages import (
    REASONING_KEYS,
    ContentGuard,
    Message,
    ReasoningPolicy,
    apply_reasoning,
    check_length,
    find_last_question,
    find_reasoning_key,
    get_text,
    is_learned,
    join_parts,
    move_blocks,
    parse_tools,
    place_reasoning,
)
from coalign.data.sources import BadRow
from coalign.types import ImageSpan, Sample, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from coalign.data.images.expansion import Placeholders


Messages = Sequence[Message]
Tools = list[dict[str, Any]]
Span = tuple[int, int]  # start and stop

TRAINING_TEMPLATES = {
    file.stem: file for file in sorted((Path(__file__).parent / "training_templates").glob("*.jinja"))
}
# Variables that every template gets. In `chat_template_kwargs`, `tools` are for rows that have none, and `date`
# replaces today's date.
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "documents", "reasoning_policy"}
_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # Hugging Face's extension of Jinja
# Arguments with which model families keep the reasoning of earlier turns.
_KEEPING = {"preserve_thinking": True, "truncate_history_thinking": False, "clear_thinking": False}


def load_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning: ReasoningPolicy | None = None,
    *,
    keep_special_tokens: bool = False,
    placeholders: Placeholders | None = None,
) -> Template:
    """Load the template of ``data.chat_template``: `auto`, `none`, a training template, Jinja or a file that holds it.

    ``chat_template_kwargs`` are the template's arguments, ``reasoning`` the policy for reasoning in assistant messages.
    ``keep_special_tokens``: a special token that a message spells is that token, not text (see ContentGuard).
    ``placeholders`` replace images in messages; None: there are no images. ValueError if the tokenizer has no
    end-of-sequence token or, with `auto`, no template, and for arguments that the template never reads.
    """
    if tokenizer.eos_token_id is None:
        name = tokenizer.name_or_path
        raise ValueError(
            f"tokenizer {name!r} has no eos_token, so no response could end; set it in tokenizer_config.json"
        )
    if chat_template == "none":
        if chat_template_kwargs or reasoning:
            raise ValueError("data.chat_template: none reads no chat_template_kwargs, and knows no reasoning")
        return PlainText(tokenizer, keep_special_tokens=keep_special_tokens, placeholders=placeholders)
    jinja, more = _jinja(tokenizer, chat_template), {"placeholders": placeholders}
    template = ChatTemplate(
        tokenizer, jinja, chat_template_kwargs, reasoning, keep_special_tokens=keep_special_tokens, **more
    )
    template.coverage.name = _name_template(tokenizer, chat_template)
    return template


def _name_template(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> str:
    if chat_template == "auto":
        return f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    return "the template in data.chat_template" if is_jinja(chat_template) else f"the chat template {chat_template}"


class PlainText:
    """Uses plain text: BOS if the tokenizer adds one, the prompt, then (for a conversation) the answer and EOS.

    Prompt and answer are tokenised separately, as in generation. BadRow unless there is one user message, followed by
    at most one answer.
    """

    jinja: str | None = None
    reasoning: ReasoningPolicy | None = None

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_special_tokens: bool = False,
        placeholders: Placeholders | None = None,
    ) -> None:
        self.tokenizer, self.guard = tokenizer, ContentGuard(tokenizer, keep=keep_special_tokens)
        self.placeholders = placeholders

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """Return the tokens that the model continues with its answer."""
        if tools:
            raise BadRow("data.chat_template: none has no place for the row's tools; set a template")
        if [m["role"] for m in messages] != ["user"]:
            raise BadRow(
                f"data.chat_template: none takes a single user message, not {_roles(messages)}; set a template"
            )
        tokens, bos = self._read(messages[0]), get_bos(self.tokenizer)
        if tokens[:2] == [bos, bos]:
            tokens = tokens[1:]  # the text contains its own BOS
        return tokens[:-1] if tokens[-1:] == [get_eos(self.tokenizer)] else tokens

    def _read(self, message: Message) -> list[int]:
        content = message["content"]
        if self.placeholders is None or not isinstance(content, list):
            return self.guard.read(get_text(message), special=True)
        parts = [
            self.placeholders.write(part) if is_image(part) else self.guard.protect(part.get("text") or "")
            for part in content
        ]
        text, _ = self.placeholders.expand("".join(parts), self.placeholders.find([message]))
        return self.guard.tokenize(text, special=True)

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0, complete: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Return tokens and a loss mask: the assistant's words and the ends of its turns, from message ``since`` on.

        BadRow if the template cannot represent the messages; if ``complete``, also if it leaves out their reasoning.
        """
        if complete and any(key in messages[-1] for key in REASONING_KEYS):
            raise BadRow("data.chat_template: none has no place for the answer's reasoning; set a template")
        if messages[-1].get("tool_calls"):
            raise BadRow("data.chat_template: none has no place for the answer's tool calls; set a template")
        for message in messages:
            if unknown := list_unknown_keys(message):
                raise BadRow(f"data.chat_template: none has no place for {', '.join(unknown)} of a message")
        prompt = self.prompt(messages[:-1], tools)
        answer, eos = self.guard.read(get_text(messages[-1])), get_eos(self.tokenizer)
        if answer[-1:] != [eos]:  # the text may contain its own EOS
            answer = [*answer, eos]
        return prompt + answer, [False] * len(prompt) + [is_learned(messages[-1])] * len(answer)

    def list_alternatives(self) -> Iterator[tuple[str, Template]]:
        """Yield other settings, in words, that may work where these fail: none."""
        return iter(())


class ChatTemplate:
    """Applies a Jinja chat template.

    The loss mask comes from the template's ``{% generation %}`` blocks if it has them. Otherwise each assistant turn is
    located by rendering the messages before it (with the generation prompt) and the messages up to its end. BadRow if
    the conversation's text does not begin with one of these texts, because the template rewrites earlier turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        jinja: str,
        arguments: Mapping[str, Any] | None = None,
        reasoning: ReasoningPolicy | None = None,
        *,
        keep_special_tokens: bool = False,
        placeholders: Placeholders | None = None,
    ) -> None:
        self.tokenizer, self.guard = tokenizer, ContentGuard(tokenizer, keep=keep_special_tokens)
        self.placeholders = placeholders
        self.jinja, self.given = jinja, {**(arguments or {})}
        self.reasoning: ReasoningPolicy | None = reasoning
        self._arguments, self._tools = read_arguments(jinja, self.given)
        if "reasoning_policy" in list_arguments(jinja):  # a training template of Coalign
            self._arguments["reasoning_policy"] = reasoning
        self._special = list_special_tokens(tokenizer)
        self._knows_tools = reads_tools(jinja)
        self._marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", jinja) is not None
        self.coverage = CoverageCheck("the chat template", jinja)

    def render(self, messages: Messages, tools: Tools | None = None, *, generation_prompt: bool = False) -> str:
        """Render the text of protected messages. BadRow with the template's own message if it refuses them."""
        text = self._apply(self._shape(messages), tools, generation_prompt)
        return check_length(self._expand(text, messages)[0])

    def _apply(self, messages: Messages, tools: Tools | None, generation_prompt: bool = False) -> str:
        with _refuse_errors(messages):
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=cast(Any, self._check_tools(tools)),  # a list is invariant, and theirs admits callables
                chat_template=self.jinja,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._arguments,
            )
        return cast(str, text)

    def check_coverage(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        since: int = 0,
        learned: int | None = None,
        generation_prompt: bool = False,
    ) -> None:
        """Raise BadRow if the template leaves out something of protected messages (see CoverageCheck)."""

        def render(standing: list[Message]) -> str:
            return self._apply(self._shape(standing), tools, generation_prompt)

        form = (bool(tools), generation_prompt)
        self.coverage.check(messages, render, form=form, since=since, learned=learned)

    def _expand(self, text: str, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        if self.placeholders is None:
            return text, []
        return self.placeholders.expand(text, self.placeholders.find(messages))

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template reads only contents that are lists of parts, as some vision-language models' do."""
        contents: list[Any] = ["qztextqz", [{"type": "text", "text": "qztextqz"}]]
        return [self._try([{"role": "user", "content": content}]).count("qztextqz") for content in contents] == [0, 1]

    @cached_property
    def _block_key(self) -> str | None:
        """The key to which a block of reasoning in a content is moved; None if the template reads such blocks."""
        if (key := find_reasoning_key(self.jinja)) is None:
            return None
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "qztextqz"}
        moved = self._try([question, answer | {key: "qzthoughtqz"}])
        content = self.guard.protect("<think>\nqzthoughtqz\n</think>\n\nqztextqz")
        return key if "qzthoughtqz" in moved and self._try([question, answer | {"content": content}]) != moved else None

    def _try(self, messages: list[Message]) -> str:
        with suppress(BadRow):
            return self._apply(messages, None)
        return ""

    def protect(self, messages: Messages, tools: Tools | None = None) -> tuple[list[Message], Tools | None]:
        """Prepare messages for `render`: their reasoning by the policy, special tokens in contents as codes."""
        joined = [m | {"content": join_parts(m["content"])} for m in messages]
        if self.reasoning is None and self._block_key is not None:
            joined = move_blocks(joined, self._block_key)
        messages, tools = self.guard.protect((apply_reasoning(joined, self.reasoning), tools))
        return place_reasoning(messages, self.jinja) if self.reasoning else list(messages), tools

    def _shape(self, messages: Messages) -> list[Message]:
        """Replace contents that are texts by parts, for a template that reads only parts."""
        if not self._needs_parts:
            return list(messages)
        return [
            m if isinstance(m["content"], list) else m | {"content": [{"type": "text", "text": m["content"]}]}
            for m in messages
        ]

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        messages, tools = self.protect(messages, tools)
        text = self.render(messages, tools, generation_prompt=True)
        self.check_coverage(messages, tools, generation_prompt=True)
        return self.guard.tokenize(text)

    def list_alternatives(self) -> Iterator[tuple[str, ChatTemplate]]:
        """Yield other settings, in words, that may work where these fail: first those that write the same prompts."""
        names = list_arguments(self.jinja) - {*self.given}
        same_template = [
            ("", more) for more in ({}, *({name: value} for name, value in _KEEPING.items() if name in names))
        ]
        training_templates = [(name, {}) for name in TRAINING_TEMPLATES]
        policies: list[ReasoningPolicy | None] = [self.reasoning] if self.reasoning else [None, "keep"]
        templates = (same_template, training_templates)
        tries = [(*variant, policy) for variants in templates for policy in policies for variant in variants]
        for name, more, policy in [*tries, ("", {}, self.reasoning or "last")]:
            settings = {"chat_template": name} if name else {}
            settings |= {"chat_template_kwargs": json.dumps(more)} if more else {}
            settings |= {"reasoning": policy} if policy != self.reasoning else {}
            with suppress(ValueError, BadRow):
                template = self._vary(more, policy, name)
                if settings and self._begins_like(template):
                    yield " with ".join(f"data.{key}: {value}" for key, value in settings.items()), template
        for value in (False, True) if "enable_thinking" in names else ():  # other prompts, but they may be meant
            more = {"enable_thinking": value}
            yield (words := f"data.chat_template_kwargs: {json.dumps(more)}"), self._vary(more, self.reasoning)
            for further, template in self._vary(more, self.reasoning).list_alternatives():
                yield f"{further} with {words}", template

    def _vary(self, more: Mapping[str, Any], policy: ReasoningPolicy | None, name: str = "") -> ChatTemplate:
        jinja = read_template(name) if name else self.jinja
        return ChatTemplate(
            self.tokenizer,
            jinja,
            {**self.given, **more},
            policy,
            keep_special_tokens=self.guard.keep,
            placeholders=self.placeholders,
        )

    def _begins_like(self, template: ChatTemplate) -> bool:
        """Whether both write the same prompts."""
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
        tools: list[Tools | None] = [None]
        if self._knows_tools:
            tools.append([{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}])
        return all(
            self.render(asked, some, generation_prompt=True) == template.render(asked, some, generation_prompt=True)
            for some in tools
        )

    def conversation(
        self, messages: Messages, tools: Tools | None = None, *, since: int = 0, complete: bool = False
    ) -> tuple[list[int], list[bool]]:
        between = range(since, find_last_question(messages) if self.reasoning == "last" else 0)
        if learned := [i for i in between if is_learned(messages[i])]:
            raise BadRow(
                f"data.reasoning: last drops the reasoning of message {learned[0]}, which is learned: the model is "
                "asked again after it; learn from the last question on"
            )
        messages, tools = self.protect(messages, tools)
        find = self._generation_blocks if self._marks_generation else self._assistant_turns
        text, spans = find(messages, tools, since)
        self.check_coverage(messages, tools, learned=since if complete else None)
        tokens = self.guard.tokenize(text)
        mask = [False] * len(tokens)
        for start, stop in spans:
            first, last = self._position(tokens, text, start), self._position(tokens, text, stop)
            mask[first:last] = [True] * (last - first)
        if not any(mask) and any(map(is_learned, messages[since:])):
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
            (text,), blocks = render_jinja_template(
                [self._shape(messages)],
                tools=cast(Any, self._check_tools(tools)),
                chat_template=self.jinja,
                return_assistant_tokens_mask=True,
                **{**special, **self._arguments},
            )
        (spans,) = cast(list[list[Span]], blocks)
        text, moved = self._expand(text, messages)
        spans = [(shift(start, moved), shift(stop, moved)) for start, stop in spans] if moved else spans
        left_out = [(i, i + 1) for i, m in enumerate(messages) if i >= since and m.get("weight") == 0]
        for first, stop in [(0, since), *left_out]:
            begin, end = (self._find_beginning(text, messages, tools, i) for i in (first, stop))
            spans = [span for span in spans if not begin <= span[0] < end]
        return text, spans

    def _assistant_turns(self, messages: Messages, tools: Tools | None, since: int) -> tuple[str, list[Span]]:
        """Render the text, with the character spans of the assistant's words and ends of turns."""
        text = self.render(messages, tools)
        spans = []
        for i, message in enumerate(messages[since:], since):
            if not is_learned(message):
                continue
            if i == 0:
                raise BadRow("the conversation begins with the assistant")
            beginning = self.render(messages[:i], tools, generation_prompt=True)
            if not text.startswith(beginning):
                self._find_beginning(text, messages, tools, i)  # raises if earlier messages are rendered differently
                raise BadRow(
                    f"asked to answer, the chat template writes {beginning[-40:]!r}, but before the assistant's "
                    f"message {i} something else, so its tokens cannot be told from the rest; put {{% generation %}} "
                    "blocks into data.chat_template"
                )
            spans.append((len(beginning), self._find_beginning(text, messages, tools, i + 1)))
        return text, spans

    def _find_beginning(self, text: str, messages: Messages, tools: Tools | None, stop: int) -> int:
        """Count the characters of the conversation's text that belong to its first ``stop`` messages."""
        if stop in (0, len(messages)):
            return len(text) if stop else 0
        beginning = self.render(messages[:stop], tools)
        if not text.startswith(beginning):
            raise BadRow(
                f"the chat template renders messages 0 to {stop - 1} differently when more follow, so the assistant's "
                "tokens cannot be told from the rest; put {% generation %} blocks into data.chat_template, or learn "
                "only the last turn (data.train_on: last)"
            )
        return len(beginning)

    def _check_tools(self, tools: Tools | None) -> Tools | None:
        tools = tools or self._tools
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
        """Train on the token that ends each turn, and on none after it; add EOS if the last turn has no such token."""
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


def encode_learned(
    template: Template, messages: Messages, tools: Tools | None = None, *, since: int = 0
) -> tuple[list[int], list[bool]]:
    """Encode a conversation whose turns from message ``since`` on are learned, with all of their reasoning.

    BadRow if the template cannot; the message names settings of ``data`` that would work.
    """
    try:
        return template.conversation(messages, tools, since=since, complete=True)
    except BadRow as error:
        if error.reason != "invalid":
            raise
        for words, alternative in template.list_alternatives():
            first = find_last_question(messages) + 1 if alternative.reasoning == "last" else since
            try:
                alternative.conversation(messages, tools, since=max(since, first), complete=True)
            except BadRow:
                continue
            raise BadRow(f"{error}; {words} would do") from error
        raise


@contextmanager
def _refuse_errors(messages: Messages) -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as error:
        raise BadRow(f"the chat template refuses the messages ({_roles(messages)}): {error}") from error


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Tensor | list[int], *, skip_special: bool = False) -> str:
    """Decode tokens without cleaning up spaces."""
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
                f"template, a file that holds one, one of ours ({', '.join(TRAINING_TEMPLATES)}), or to `none` for "
                "plain text"
            )
        return tokenizer.get_chat_template()
    return read_template(chat_template)


@lru_cache
def list_arguments(jinja: str) -> frozenset[str]:
    """Return the names that a template reads, without its own variables. ValueError if it is no Jinja."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAGS.sub("", jinja))
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no valid Jinja: line {error.lineno}: {error.message}") from error
    assigned = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    tests = [test.node for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    optional = {name.name for name in tests if isinstance(name, nodes.Name)}  # the template sets a default
    return frozenset(meta.find_undeclared_variables(parsed) - (assigned - optional))


def read_arguments(jinja: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Tools | None]:
    """Return the arguments that the template is rendered with, and the tools among them.

    ValueError for a name that the template never reads, and for a date that is none.
    """
    read = list_arguments(jinja)
    names = {*read - _GIVEN, *(["date"] if "strftime_now" in read else [])}
    for name in given:
        if name not in names:
            raise ValueError(
                f"chat_template_kwargs: the chat template never reads {name!r}"
                + (suggest(name, sorted(n for n in names if not n.endswith("_token"))) or "; it has no arguments")
            )
    arguments = {name: value for name, value in given.items() if name != "tools"}
    if "date" in given and "strftime_now" in read:
        try:
            arguments["strftime_now"] = date.fromisoformat(str(given["date"])).strftime
        except ValueError as error:
            raise ValueError(f"chat_template_kwargs.date: {given['date']!r} is no date like 2026-01-31") from error
    return arguments, parse_tools(given["tools"], "chat_template_kwargs.tools") if "tools" in given else None


def store_arguments(jinja: str, arguments: Mapping[str, Any]) -> str:
    """Return a template with ``arguments`` as defaults of its own. Names that it never reads, and None, are dropped."""
    stored = sorted(name for name in list_arguments(jinja) if arguments.get(name) is not None)
    lines = [
        f"{{%- set {name} = {_write_literal(arguments[name])} if {name} is undefined or {name} is none else {name} +%}}"
        for name in stored
    ]
    return "".join([*lines, jinja])  # `+`: Jinja drops no line break after it


def _write_literal(value: Any) -> str:
    """Write plain data as Jinja."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_write_literal(key)}: {_write_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_write_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def reads_tools(jinja: str) -> bool:
    """Whether a Jinja template has a place for the descriptions of tools."""
    return re.search(r"\btools\b", jinja) is not None


def is_jinja(chat_template: str) -> bool:
    """Whether a `chat_template` is the template itself, not its name."""
    return "{{" in chat_template or "{%" in chat_template


def read_template(chat_template: str) -> str:
    """Return the Jinja text of ``data.chat_template``: itself, a training template's or a file's. FileNotFoundError."""
    if is_jinja(chat_template):
        return chat_template
    path = TRAINING_TEMPLATES.get(chat_template) or Path(chat_template)
    if not path.is_file():
        raise FileNotFoundError(
            f"data.chat_template: {chat_template!r} is neither `auto`, `none`, a Jinja template, a file that exists, "
            f"nor one of ours{suggest(chat_template, TRAINING_TEMPLATES)}"
        )
    return path.read_text(encoding="utf-8-sig")


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

    ``prompt`` is the text that the model saw, special tokens included, with one placeholder for each run of them;
    ``raw_response`` is everything after it, likewise.
    ``response`` is the policy's last turn without special tokens. ``messages`` is the episode's conversation; for a
    single turn the row's messages (or else the prompt as the user's) and the response.
    """
    samples = batch.samples()
    for sample, start in zip(samples, batch["prompt_length"].tolist(), strict=True):
        sample.prompt = decode(tokenizer, _collapse_images(sample.tokens[:start], sample.images))
        sample.raw_response = decode(tokenizer, sample.tokens[start:])
        sample.response = decode(tokenizer, sample.tokens[_find_last_turn(sample, start) :], skip_special=True)
        prompt = sample.meta.get("messages") or [{"role": "user", "content": sample.prompt}]
        sample.messages = sample.messages or [*prompt, {"role": "assistant", "content": sample.response}]
    return samples


def locate_images(template: Template, tokens: Sequence[int], messages: Messages) -> tuple[ImageSpan, ...]:
    """Find the images of ``messages`` in the tokens that ``template`` makes of them. BadRow (image)."""
    placeholders = template.placeholders
    return () if placeholders is None else placeholders.locate(tokens, placeholders.find(messages))


def _collapse_images(tokens: Tensor, images: Sequence[ImageSpan]) -> Tensor:
    """Shorten each image's span to a single placeholder."""
    if not images:
        return tokens
    kept = [True] * len(tokens)
    for span in images:
        kept[span.start + 1 : span.stop] = [False] * len(kept[span.start + 1 : span.stop])
    return tokens[kept]


def _find_last_turn(sample: Sample, start: int) -> int:
    """Position at which the policy's last turn begins: after the last token that it did not generate."""
    external = (~sample.loss_mask[start:]).nonzero()
    return start + int(external[-1]) + 1 if len(external) and bool(sample.loss_mask[-1]) else start


def is_finished(status: Tensor) -> Tensor:
    """bool[N]: whether a sequence can be scored; failed and unfinished ones cannot."""
    return (status == Status.OK) | (status == Status.TRUNCATED)
