"""A tokenizer read from its files by `tokenizers` alone, without importing transformers, which takes two seconds.

`coalign check` reads rows with it. It has the methods of transformers' tokenizers that reading rows needs, and gives
the same tokens. transformers reads files with anything unusual, and its versions that were not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from coalign.files import read_json_object

COMPARED_VERSIONS = ("5.19.",)  # beginnings of versions of transformers
MAX_TOKENS = 100_000  # transformers examines whether a larger vocabulary is Mistral's
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Files with which transformers overrides tokenizer.json.
EXTRAS = ("special_tokens_map.json", "added_tokens.json", "tekken.json", "tokenizer.model", "additional_chat_templates")
# Keys of tokenizer_config.json that change nothing, with their harmless values; None: any.
HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "add_prefix_space": (False, None),
    "backend": ("tokenizers",),
    "clean_up_tokenization_spaces": None,  # `decode` is told not to
    "errors": ("replace",),
    "extra_special_tokens": ([], None),
    "is_local": None,
    "local_files_only": None,
    "model_max_length": None,
    "split_special_tokens": (False,),
    "tokenizer_class": ("TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
}
END_OF_TEXT = "<|endoftext|>"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# Settings of Qwen's tokenizers that override their tokenizer.json.
QWEN: dict[str, Any] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
            BYTES,
        ],
    },
    "decoder": BYTES | {"add_prefix_space": True, "use_regex": True},
}
QWEN_MODEL = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


class _FileTokenizer:
    """Encodes and decodes as transformers' tokenizer of the same files does. ``special``: names of special tokens."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, str], template: str | None, name: str) -> None:
        self.backend, self.special_tokens_map = tokenizer, dict(special)
        self.chat_template, self.name_or_path = template, name

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False, verbose: bool = True
    ) -> dict[str, list[int]]:
        self.backend.encode_special_tokens = split_special_tokens
        return {"input_ids": self.backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(
        self, tokens: Any, *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        numbers = tokens if isinstance(tokens, list) else tokens.tolist()
        return self.backend.decode(numbers, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()

    def add_tokens(self, tokens: Sequence[AddedToken]) -> int:
        return self.backend.add_tokens([*tokens])

    def convert_tokens_to_ids(self, token: str) -> int | None:
        number = self.backend.token_to_id(token)
        return self.unk_token_id if number is None else number

    def convert_ids_to_tokens(self, number: int) -> str | None:
        return self.backend.id_to_token(number)

    @property
    def bos_token_id(self) -> int | None:
        return self._find_special("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._find_special("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._find_special("unk_token")

    def _find_special(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def get_chat_template(self) -> str:
        assert self.chat_template is not None, "asked for where there is one"
        return self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        chat_template: str,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **arguments: Any,
    ) -> str:
        """Render messages as a text. jinja2's TemplateError for what the template refuses."""
        named = {"messages": messages, "tools": tools, "documents": None}
        return _compile(chat_template).render(
            **named, add_generation_prompt=add_generation_prompt, **{**self.special_tokens_map, **arguments}
        )


def open_file_tokenizer(directory: Path) -> _FileTokenizer | None:
    """Read the tokenizer of a model's directory. None for one that transformers has to read."""
    files = [directory / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if not version("transformers").startswith(COMPARED_VERSIONS) or not all(file.is_file() for file in files):
        return None
    try:
        family, settings, content = map(read_json_object, files)
        special = {name: token for name in SPECIAL if (token := settings.pop(name, None)) is not None}
        template = _read_chat_template(directory, settings)
        class_name = _find_class(str(family.get("model_type")), str(settings.get("tokenizer_class")))
        harmless = all(k in HARMLESS and (HARMLESS[k] is None or v in HARMLESS[k]) for k, v in settings.items())
        if class_name is None or any((directory / name).exists() for name in EXTRAS) or not harmless:
            return None
        if class_name == "Qwen2Tokenizer":
            special = {"unk_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT} | special
        if not _is_plain(content, {*special.values()}):
            return None
        if class_name == "Qwen2Tokenizer":
            text = json.dumps({**content, **QWEN, "model": content["model"] | QWEN_MODEL})
            return _FileTokenizer(Tokenizer.from_str(text), special, template, str(directory))
        return _FileTokenizer(Tokenizer.from_file(str(files[-1])), special, template, str(directory))
    except Exception:  # transformers says what is wrong with the files
        return None


def _read_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    template, file = settings.pop("chat_template", None), directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not isinstance(template, str | None):
        raise ValueError("several chat templates")
    return template


def _find_class(family: str, name: str) -> str | None:
    """Return the class that transformers takes for a family of models and the class in tokenizer_config.json."""
    name = name.removesuffix("Fast").replace("PreTrainedTokenizer", "TokenizersBackend")
    by_family = {"llama": name, "qwen3": name, "qwen2": "Qwen2Tokenizer"}
    return by_family.get(family)


def _is_plain(content: Mapping[str, Any], special: set[Any]) -> bool:
    """Whether a tokenizer.json is byte-pair encoding whose special tokens are there, marked as such."""
    model, added = content["model"], content["added_tokens"]
    marked = {token["content"] for token in added if token["special"] and not token["normalized"]}
    return (
        model["type"] == "BPE"
        and special <= marked
        and len(model["vocab"]) + len(added) <= MAX_TOKENS
        and content["truncation"] is content["padding"] is None
    )


class _GenerationTag(Extension):
    """Parses `{% generation %}`, which marks the learned text, and renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache
def _compile(template: str) -> jinja2.Template:
    """Compile a chat template as transformers does: the same sandbox, whitespace, filters and functions."""
    extensions = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _write_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)


def _write_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    """Write plain JSON; jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
