"""Chat messages of rows: validated, normalised, and converted to text.

A message is a dict with ``role`` and ``content`` (a text, or a list of parts as in chat APIs). Its other keys are for
the chat template, or hold the reasoning of an assistant's message. ContentGuard tokenises contents as text, also where
they spell a control token.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from coalign.data.sources import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
# Speakers in the key `from` of ShareGPT's and OpenHermes' conversations -> roles.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
# Roles of OpenAI before `tool`, of ms-swift and of LLaMA-Factory; CALLS are those whose content is a call.
RESULTS = {"function": "tool", "function_response": "tool", "tool_response": "tool"}
CALLS = ("function_call", "tool_call")
TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")

ReasoningPolicy = Literal["keep", "drop", "last"]
SEEN = ("image", "video")  # types of parts that vision-language models read
MEDIA = (*SEEN, "audio")
TEXTS = ("text", "input_text", "output_text", "None")  # types of parts that are texts; some have no type
# Keys of messages that hold reasoning: vLLM's and Qwen's, gpt-oss', OpenAI's and others'.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING_KEYS}  # keys that Coalign reads
_THOUGHTS = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>\s*", re.DOTALL)

MAX_CHARACTERS = 1 << 23  # 2 million tokens of English, and some 10 s of tokenising


def parse_messages(value: Any, key: str, *, images: bool = False) -> list[Message]:
    """Validate the list of messages under ``key``. BadRow for any other value, and for images unless ``images``."""
    if not isinstance(value, list):
        raise BadRow(f"'{key}' is {type(value).__name__}; expected a string or a list of {{role, content}} messages")
    return [_message(message, f"'{key}': message {i}", images) for i, message in enumerate(value)]


def parse_response(value: Any, key: str) -> list[Message]:
    """Convert the response under ``key`` to messages: a text, a message of the assistant, or a list of messages.

    BadRow (empty) if no message has content.
    """
    if isinstance(value, str):
        messages = [{"role": "assistant", "content": value}]
    elif isinstance(value, dict):
        messages = [_message(value, f"'{key}'")]
    else:
        messages = parse_messages(value, key)
    if not has_content(messages):
        raise BadRow(f"'{key}' is empty", "empty")
    return messages


def parse_transcript(text: str, key: str) -> list[Message]:
    """Split a text like "\\n\\nHuman: …\\n\\nAssistant: …" (Anthropic's hh-rlhf) into turns. BadRow for others."""
    beginning, *turns = TURN.split(text)
    if beginning.strip() or not turns:
        raise BadRow(
            f"the row has no prompt, and '{key}' is a text that does not hold one either (as messages, or as "
            "'\\n\\nHuman: …\\n\\nAssistant: …'); name the prompt's key in data.prompt_key",
            "missing",
        )
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": text.strip()} for speaker, text in pairs]


def trim_to_assistant(messages: list[Message]) -> list[Message]:
    """Drop everything after the assistant's last message. BadRow (empty) if there is none, or it has no content."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not has_content(messages[-1:]):
        raise BadRow("the assistant's last message is empty" if messages else "no message of the assistant", "empty")
    return messages


def has_content(messages: Iterable[Message]) -> bool:
    """Whether any message has text, an image or a tool call."""
    return any(get_text(message).strip() or _has_images(message) or message.get("tool_calls") for message in messages)


def _has_images(message: Message) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(part.get("type") in SEEN for part in content)


def get_text(message: Message) -> str:
    content = message["content"]
    return "".join(part.get("text") or "" for part in content) if isinstance(content, list) else content


def replace_text(message: Message, text: str) -> str | list[dict[str, Any]]:
    """Return the content of a message with another text, after its images if it has any."""
    if not _has_images(message):
        return text
    return [*(part for part in message["content"] if part.get("type") in SEEN), {"type": "text", "text": text}]


def format_prompt(messages: list[Message]) -> str:
    """Format a prompt for people: a single message as it is, several as "role: text" paragraphs."""
    spoken = [m for m in messages if m["role"] != "system"]
    if len(spoken) == 1:
        return get_text(spoken[0])
    return "\n\n".join(f"{m['role']}: {get_text(m)}" for m in spoken)


def parse_tools(value: Any, key: str) -> list[dict[str, Any]] | None:
    """Parse descriptions of tools: a list of JSON Schema objects, or JSON text of it. None for an empty list."""
    value = parse_json(value or None, key)
    tools = [parse_json(tool, key) for tool in value] if isinstance(value, list) else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"'{key}' is no list of JSON Schema functions: {str(value)[:80]}")
    bare = [isinstance(tool.get("name"), str) and "parameters" in tool for tool in tools]
    return [{"type": "function", "function": t} if b else t for t, b in zip(tools, bare, strict=True)] or None


def _message(value: Any, label: str, images: bool = False) -> Message:
    """Validate a message, and convert it to the form that Coalign uses.

    Keys without a value are removed; tool calls become objects; a content of text parts alone becomes a text.
    """
    message = _name_keys(value, label)
    if message["role"] in CALLS:
        message = _read_called(message, label)
    if calls := _read_calls(message, label):
        message["tool_calls"] = calls
    if "content" not in message and not calls:
        raise BadRow(f"{label} is not an object with role and content: {str(value)[:80]}")
    message["content"] = _read_content(message.get("content"), label, images)
    return _read_reasoning(_read_weight(message, label), label)


def _name_keys(value: Any, label: str) -> Message:
    """Return the message without keys that are None, with `role` and `content` in place of `from` and `value`."""
    entries = value.items() if isinstance(value, dict) else ()
    message = {key: entry for key, entry in entries if entry is not None or key == "content"}
    if "role" not in message and isinstance(said := message.get("from"), str):
        rest = {key: entry for key, entry in message.items() if key not in ("from", "value", "content")}
        message = rest | {"role": ROLES.get(said, said)} | ({"content": value["value"]} if "value" in value else {})
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{label} is not an object with role and content: {str(value)[:80]}")
    return message | {"role": RESULTS.get(str(message["role"]), message["role"])}


def _read_content(content: Any, label: str, images: bool) -> str | list[dict[str, Any]]:
    """Return a text, or parts if any of them is an image or a video. BadRow for parts of other types."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise BadRow(f"{label}: content is {type(content).__name__}; expected a string or a list of parts")
        return content or ""
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str | None):
            raise BadRow(f"{label}: a part of content is an object, maybe with a text, not {str(part)[:80]}")
        name = str(part.get("type"))
        medium = name.removeprefix("input_").removesuffix("_url")
        if medium in MEDIA and not (images and name in SEEN):
            seen = f"{medium}s are read if data.images is set"
            remedy = seen if medium in SEEN else "Coalign reads text, images and videos"
            raise BadRow(f"{label}: a part of content is of type '{name}'; {remedy}")
        if medium not in MEDIA and (name not in TEXTS or ("text" not in part and part.keys() != {"type"})):
            raise BadRow(f"{label}: a part of content is no text: {str(part)[:80]}")
    return content if any(part.get("type") in SEEN for part in content) else get_text({"content": content})


def join_parts(content: Any) -> Any:
    """Join parts of a content that are all texts; return any other content as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        return content
    return "".join(part["text"] or "" for part in content)


def _read_called(message: Message, label: str) -> Message:
    """Read a turn whose content is a call, or a list of calls, as JSON text; a block of reasoning may precede it."""
    content = join_parts(message.get("content"))
    block = _THOUGHTS.match(content) if isinstance(content, str) else None
    calls = parse_json(content[block.end() :] if block else content, f"{label}: {message['role']}")
    said = {"content": block[0].strip() if block else "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message | {"role": "assistant"} | said


def _read_calls(message: Message, label: str) -> list[dict[str, Any]]:
    """Take the calls of tools out of a message, those under OpenAI's older `function_call` as well."""
    calls, call = (parse_json(message.pop(key, None) or None, key) for key in ("tool_calls", "function_call"))
    if calls and call:
        raise BadRow(f"{label} has both tool_calls and function_call; leave one out")
    calls = [call] if call else calls or []
    if not isinstance(calls, list):
        raise BadRow(f"{label}: tool_calls is {type(calls).__name__}; expected a list")
    return [_tool_call(call, label) for call in calls]


def _tool_call(call: Any, label: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates expect; chat APIs have JSON text."""
    call = {key: entry for key, entry in call.items() if entry is not None} if isinstance(call, dict) else {"": call}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{label}: a tool call is an object with function: {{name, arguments}}, not {str(call)[:80]}")
    arguments = function.get("arguments")
    arguments = parse_json(arguments.strip() or None if isinstance(arguments, str) else arguments, "arguments") or {}
    if not isinstance(arguments, dict):
        raise BadRow(f"{label}: the arguments of '{function['name']}' are {str(arguments)[:80]!r}; expected an object")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else {"type": "function", "function": function}


def _read_weight(message: Message, label: str) -> Message:
    """Keep `weight` only if it is 0, on an answer that is not learned. BadRow for any other weight."""
    if (weight := message.pop("weight", None)) is None:
        return message
    if weight not in (0, 1):
        raise BadRow(f"{label}: weight is {weight!r}; expected 1, or 0 for an answer that is not learned")
    if weight and message["role"] != "assistant":
        raise BadRow(f"{label}: weight is 1, and only what the assistant says is learned, not role '{message['role']}'")
    return message if weight or message["role"] != "assistant" else message | {"weight": 0}


def _read_reasoning(message: Message, label: str) -> Message:
    """Leave out reasoning that is empty or repeated. BadRow if it is no text, or if two reasonings differ."""
    reasoning = {key: message.pop(key) for key in REASONING_KEYS if key in message}
    for key, value in reasoning.items():
        if not isinstance(value, str) or (value.strip() and message["role"] != "assistant"):
            raise BadRow(f"{label}: {key} is {str(value)[:80]!r}; expected a text, in messages of the assistant")
    reasoning = {key: value for key, value in reasoning.items() if value.strip()}
    if not reasoning:
        return message
    block, rest = split_reasoning(message)
    if len({value.strip() for value in (*reasoning.values(), block) if value}) > 1:
        also = " and in a <think> block" if block else ""
        raise BadRow(f"{label} has different reasoning under {', '.join(reasoning)}{also}")
    key, value = next(iter(reasoning.items()))
    return (rest if block else message) | {key: value}


def is_learned(message: Message) -> bool:
    """Whether a message is one of the assistant whose `weight` is not 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def parse_json(value: Any, key: str) -> Any:
    """Parse a JSON text; return any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise BadRow(f"'{key}' is no valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists in lists in lists
        raise BadRow(f"'{key}' is no valid JSON: {error}") from error


def split_reasoning(message: Message) -> tuple[str, Message]:
    """Return an assistant message's reasoning ("" for none) and the message without it.

    It is the value of one of REASONING_KEYS, or a block at the beginning of the content that `</think>` ends. `<think>`
    may be missing: some templates begin the answer with it.
    """
    rest = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    if reasoning := next(
        (value for key in REASONING_KEYS if isinstance(value := message.get(key), str) and value.strip()), ""
    ):
        return reasoning.strip(), rest
    block = _THOUGHTS.match(text := get_text(message))
    return (block[1].strip(), rest | {"content": text[block.end() :]}) if block else ("", rest)


def apply_reasoning(messages: Sequence[Message], policy: ReasoningPolicy | None) -> list[Message]:
    """Remove the reasoning that ``policy`` drops, and move the rest to ``reasoning_content``.

    `last` keeps the reasoning after the last user message. None returns the messages unchanged.
    """
    if policy is None:
        return list(messages)
    since = {"keep": 0, "last": find_last_question(messages), "drop": len(messages)}[policy]
    return [
        _move_reasoning(message, i >= since) if message["role"] == "assistant" else message
        for i, message in enumerate(messages)
    ]


def find_last_question(messages: Sequence[Message]) -> int:
    """Return the index of the last user message; 0 if there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)


def find_reasoning_key(jinja: str) -> str | None:
    """Find the key of messages under which the template ``jinja`` reads reasoning; None if it reads none."""
    return next((key for key in REASONING_KEYS if re.search(rf"\b{key}\b", jinja)), None)


def place_reasoning(messages: Sequence[Message], jinja: str) -> list[Message]:
    """Move ``reasoning_content`` to the key that the template ``jinja`` reads, or else into the content."""
    key = find_reasoning_key(jinja)
    if key == REASONING_KEYS[0]:
        return list(messages)
    return [_place_reasoning(message, key) if REASONING_KEYS[0] in message else message for message in messages]


def move_blocks(messages: Sequence[Message], key: str) -> list[Message]:
    """Move blocks of reasoning at the beginning of assistant messages to ``key``, unless they have such a key."""
    return [
        _place_reasoning(message, key)
        if message["role"] == "assistant" and not any(key in message for key in REASONING_KEYS)
        else message
        for message in messages
    ]


def _move_reasoning(message: Message, keep: bool) -> Message:
    reasoning, rest = split_reasoning(message)
    return rest | {REASONING_KEYS[0]: reasoning} if keep and reasoning else rest


def _place_reasoning(message: Message, key: str | None) -> Message:
    reasoning, rest = split_reasoning(message)
    if not reasoning:
        return rest
    if key is not None:
        return rest | {key: reasoning}
    return rest | {"content": f"<think>\n{reasoning}\n</think>\n\n{get_text(rest)}"}


class ContentGuard:
    """Keeps contents from forging control tokens: where they spell a special token, it is tokenised as text.

    Before a template sees contents, `protect` replaces each such spelling by a code, which templates do not change.
    `tokenize` reads a code as the text that it stands for; special tokens spelled beside codes come from the template.
    A text without codes is tokenised as usual. With ``keep`` nothing is replaced.

    ``codes_read`` counts the codes that were read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keep: bool = False) -> None:
        self.tokenizer, self.keep, self.codes_read = tokenizer, keep, 0
        added = tokenizer.added_tokens_decoder.items()
        self._tokens = {token.content: (i, token) for i, token in added if token.special and token.content}
        self._numbers = {text: number for number, text in enumerate(self._tokens)}
        nonce = secrets.token_hex(8)  # so that no content can spell a code or a name
        self._code, self._name = f"x{nonce}n", f"y{nonce}n"
        markers = "|".join(re.escape(text) for text in sorted(self._tokens, key=len, reverse=True)) or "(?!)"
        self._marker = re.compile(markers)
        self._code_or_marker = re.compile(rf"{self._code}(\d+)z|{markers}")

    def protect(self, value: Any) -> Any:
        """Replace special tokens in a value (texts, in lists and dicts) by codes; return it itself if it has none."""
        if self.keep:
            return value
        if isinstance(value, str):
            if self._marker.search(value) is None:
                return value
            return self._marker.sub(lambda match: f"{self._code}{self._numbers[match[0]]}z", value)
        if isinstance(value, list | tuple):
            items = [self.protect(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        if isinstance(value, dict):
            if value.get("type") in SEEN:  # a path, which no template writes
                return value
            items = {self.protect(key): self.protect(item) for key, item in value.items()}
            same = all(key in items and items[key] is item for key, item in value.items())
            return value if same else items
        return value

    def is_spelled(self, value: Any) -> bool:
        """Whether the value spells a special token that stays text."""
        return self.protect(value) is not value

    def find_marker(self, text: str, end: int) -> int:
        """Return where the last special token of a text before ``end`` begins; 0 if there is none."""
        return max((match.start() for match in self._marker.finditer(text, 0, end)), default=0)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenise a text of protected contents, with the tokenizer's BOS and EOS only if ``special``."""
        if self._code not in check_length(text):
            return tokenize(self.tokenizer, text, special=special)
        self.codes_read += text.count(self._code)
        # Tokenizers in Python cannot split special tokens alone, and some models (Unigram, WordLevel) find them all the
        # same: there, the content's spelling is cut in two.
        forged = {i for i, _ in self._tokens.values() if i != self.tokenizer.unk_token_id}
        respelled = self._spell(text, "")
        can_split = self.tokenizer.is_fast and forged.isdisjoint(self._split(respelled))
        safe = respelled if can_split else self._spell(text, f"{self._name}cut")
        return [token for i in self._split(safe, special) if (token := self._ids.get(i, i)) is not None]

    def read(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenise a content without a template."""
        return self.tokenize(self.protect(text), special=special)

    def check_setting(self, text: str, key: str) -> None:
        """Raise ValueError for a setting that becomes part of contents and spells a special token."""
        if not self.keep and (marker := self._marker.search(text)):
            raise ValueError(
                f"{key} spells the special token {marker[0]!r}, which contents cannot write: it would be read as text. "
                "Write it in a chat template, or set keep_special_tokens for sources that may write such tokens"
            )

    def _spell(self, text: str, cut: str) -> str:
        """Rename the template's special tokens, and restore those of contents, with ``cut`` inside."""

        def spell(match: re.Match[str]) -> str:
            if match[1] is None:
                return f"{self._name}{self._numbers[match[0]]}z"
            content = [*self._tokens][int(match[1])]
            return content[:1] + cut + content[1:]

        return self._code_or_marker.sub(spell, text)

    def _split(self, text: str, special: bool = False) -> list[int]:
        options: dict[str, Any] = {"split_special_tokens": self.tokenizer.is_fast, "verbose": False}
        return cast(list[int], self._splitting(text, add_special_tokens=special, **options)["input_ids"])

    @cached_property
    def _splitting(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer that splits special tokens, and has other names for them.

        Splitting is a state of a tokenizer, and other threads use the original."""
        from transformers import AddedToken

        names = [
            AddedToken(f"{self._name}{n}z", lstrip=t.lstrip, rstrip=t.rstrip, normalized=False, special=False)
            for n, (_, t) in enumerate(self._tokens.values())
        ]
        copied = copy.deepcopy(self.tokenizer)
        copied.add_tokens([*names, AddedToken(f"{self._name}cut", normalized=False, special=False)])
        return copied

    @cached_property
    def _ids(self) -> dict[int, int | None]:
        """Map the ids of the other names to those of the special tokens; the cut's to None."""
        named: dict[str, int | None] = {f"{self._name}{n}z": i for n, (i, _) in enumerate(self._tokens.values())}
        named[f"{self._name}cut"] = None
        return {cast(int, self._splitting.convert_tokens_to_ids(name)): i for name, i in named.items()}


def check_length(text: str) -> str:
    """Return the text. BadRow (long) for one whose tokenisation would take minutes and tens of GiB of memory."""
    if len(text) > MAX_CHARACTERS:
        raise BadRow(f"a text of {len(text):,} characters; at most {MAX_CHARACTERS:,} are tokenised", "long")
    return text


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """Tokenise a text, with the tokenizer's BOS and EOS only if ``special``.

    BadRow (long) over MAX_CHARACTERS; BadRow for half of a surrogate pair, which is no character.
    """
    check_length(text)
    try:
        return cast(list[int], tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except TypeError as error:
        raise BadRow("a text holds half of a surrogate pair, which is no character") from error
