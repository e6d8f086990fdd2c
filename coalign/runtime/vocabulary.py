"""Whether models and tokenizers speak of the same tokens, seen from their files."""

from __future__ import annotations

import json
from pathlib import Path

from coalign.config.schema import ModelConfig


def check_same_vocabulary(one: ModelConfig, other: ModelConfig, names: tuple[str, str]) -> None:
    """ValueError with the first difference of their tokenizer.json files; nothing where one has none."""
    here, there = _tokens(one), _tokens(other)
    if here is None or there is None or here == there:
        return
    differing = sorted({*here.items()} ^ {*there.items()}, key=lambda pair: pair[1])
    token, number = differing[0]
    raise ValueError(
        f"models.{names[1]}.load: its tokenizer is another one than that of models.{names[0]} "
        f"({len(there)} and {len(here)} tokens, {len(differing)} entries differ, first {token!r} = {number}); "
        "log-probs of tokens can only be compared over one vocabulary"
    )


def check_tokens_fit(key: str, model: ModelConfig, *, highest: int) -> None:
    """ValueError, naming ``key``, if the tokenizer's ``highest`` id has no row in the embedding of ``model``; -1: there
    are no ids at all."""
    file = Path(model.load or ".") / "config.json"
    if not file.is_file():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = content.get("vocab_size") or content.get("text_config", {}).get("vocab_size")
    if highest < 0:
        raise ValueError(f"{key}: the run's tokenizer has no tokens at all; its vocabulary file seems to be missing")
    if rows is not None and highest >= rows:
        raise ValueError(
            f"{key}: the run's tokenizer has ids up to {highest}, but {file} says vocab_size {rows}; "
            "`coalign extend-vocab` adds rows for new tokens"
        )


def _tokens(model: ModelConfig) -> dict[str, int] | None:
    directory = model.tokenizer or model.load
    file = Path(directory or ".") / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model: [piece, score] by number
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens", ())}
