"""Compares the vocabularies of models and tokenizers by their files, without loading a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from coalign.config.errors import ConfigError, ConfigProblem
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.templates import read_arguments, read_template, reads_tools
from coalign.files import read_json_object
from coalign.hub import find_directory
from coalign.weights.model_files import TOKENIZER_FILES

if TYPE_CHECKING:
    from coalign.environments.loop import Environments


def find_tokenizer_name(config: RunConfig) -> tuple[str, bool]:
    """Return the name of the run's tokenizer, and the ``trust_remote_code`` of its model.

    It is the policy's, else that of the first model that has one.
    """
    named = [config.models[n] for n in ("policy", "trainer") if n in config.models]
    for model in [*named, *config.models.values()]:
        if name := model.tokenizer or model.load:
            return name, model.trust_remote_code
    key = ("models", next((n for n in ("policy", "trainer", *config.models) if n in config.models), "trainer"), "load")
    message = "missing: a Hugging Face model directory, or a name of the hub (and no other model gives a tokenizer)"
    raise ConfigError([ConfigProblem(key, message)])


def check_same_vocabulary(first: ModelConfig, second: ModelConfig, names: tuple[str, str]) -> None:
    """Raise ValueError with the first difference of two tokenizer.json files, if both models have one."""
    expected, actual = (_tokens(find_directory(model.tokenizer or model.load or ".")) for model in (first, second))
    if expected is None or actual is None or expected == actual:
        return
    differing = sorted({*expected.items()} ^ {*actual.items()}, key=lambda pair: pair[1])
    token, number = differing[0]
    raise ValueError(
        f"models.{names[1]}.load: its tokenizer is another one than that of models.{names[0]} "
        f"({len(actual)} and {len(expected)} tokens, {len(differing)} entries differ, first {token!r} = {number}); "
        "log-probs of tokens can only be compared over one vocabulary (`on_policy_distillation` compares spans of "
        f"text where models.{names[1]}.chat_template is set: `auto`)"
    )


def check_tokens_fit(key: str, model: ModelConfig, *, highest: int) -> None:
    """Raise ValueError, naming ``key``, if the tokenizer's ``highest`` id has no row in the embedding of ``model``.

    ``highest`` is -1 if the tokenizer has no tokens.
    """
    if model.load is None or not (file := find_directory(model.load) / "config.json").is_file():
        return
    content = read_json_object(file)
    rows = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
    if highest < 0:
        raise ValueError(f"{key}: the run's tokenizer has no tokens at all; its vocabulary file seems to be missing")
    if rows is not None and highest >= rows:
        raise ValueError(
            f"{key}: the run's tokenizer has ids up to {highest}, but {file} says vocab_size {rows}; "
            "`coalign extend-vocab` adds rows for new tokens"
        )


def is_tokenized_alike(model: ModelConfig, tokenizer: str) -> bool:
    """Whether the tokenizer of ``model`` and the one called ``tokenizer`` turn a conversation into the same tokens.

    They need one vocabulary and no different chat templates. A model without its own tokenizer reads any tokens.
    """
    here, there = find_directory(model.tokenizer or model.load or tokenizer), find_directory(tokenizer)
    if here.resolve() == there.resolve() or not any((here / name).is_file() for name in TOKENIZER_FILES):
        return True
    if (here / "tokenizer.json").is_file() and (there / "tokenizer.json").is_file():
        same = _tokens(here) == _tokens(there)
    else:
        same = all(_bytes(here / name) == _bytes(there / name) for name in TOKENIZER_FILES)
    templates = {template for template in (find_chat_template(here), find_chat_template(there)) if template}
    return same and len(templates) < 2


def is_scored_at_end_of_text(model: ModelConfig) -> bool:
    """Whether the settings or the model's config.json read its score after the end of the last turn."""
    file = find_directory(model.load or ".") / "config.json"
    default = read_json_object(file).get("score_at") if file.is_file() else None
    return (model.score_at or default) == "end_of_text"


def find_chat_template(directory: Path) -> str | None:
    """Return the chat template of a tokenizer's directory, several ones as JSON; None if it has none."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    template = read_json_object(file).get("chat_template") if file.is_file() else None
    return json.dumps(template) if isinstance(template, list) else template  # a list has several templates by name


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _tokens(directory: Path) -> dict[str, int] | None:
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    content = read_json_object(file)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model: [piece, score] by number
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens", ())}


def check_template(environments: Environments, config: RunConfig) -> None:
    """Refuse arguments that the chat template never reads, and one without a place for the tools of an environment.

    Such an environment has the attribute ``shows_tools``.
    """
    given, arguments = config.data.chat_template, config.data.chat_template_kwargs
    shows_tools = [e.name for e in environments.values() if getattr(e.fn, "shows_tools", False)]
    if not (arguments or shows_tools):
        return
    name, _ = find_tokenizer_name(config)
    jinja = (
        find_chat_template(find_directory(name)) if given == "auto" else "" if given == "none" else read_template(given)
    )
    if jinja is None:
        return
    if not jinja.startswith("[{"):  # a list of templates by name: the tokenizer chooses
        try:
            read_arguments(jinja, arguments)
        except ValueError as error:
            raise ValueError(f"data.{error}") from error
    if shows_tools and not reads_tools(jinja):
        which = f"that of the tokenizer in {name}" if given == "auto" else f"`{given:.40}`"
        raise ValueError(
            f"data.chat_template: the environment `{shows_tools[0]}` shows tools to the policy, and the chat template, "
            f"{which}, has no place for them (it never reads `tools`); set one that has"
        )
