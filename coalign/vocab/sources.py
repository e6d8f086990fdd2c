"""Files of new tokens: a text file, a `tokenizer.json`, or a SentencePiece model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coalign.vocab.merges import SENTENCEPIECE, find_alphabet

KINDS = ("BPE", "Unigram")


@dataclass(frozen=True)
class TokenSource:
    """Distinct tokens as the bytes they stand for, the most useful first.

    vocabulary: the tokens are pieces of a tokenizer, rather than a list that somebody wrote. skipped: reason -> what
    was left out.
    """

    path: Path
    tokens: list[bytes]
    vocabulary: bool
    skipped: dict[str, list[str]] = field(default_factory=dict)


def read_tokens(path: Path) -> TokenSource:
    """Read a SentencePiece model (`.model`), a tokenizer.json (`.json`), or a text file with one token per line.

    Raises FileNotFoundError, and ValueError for a file of another format or without tokens.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--tokens: {path} is not a file")
    source = {".model": _read_sentencepiece, ".json": _read_tokenizer_json}.get(path.suffix, _read_lines)(path)
    if not source.tokens:
        raise ValueError(f"--tokens: {path} holds no tokens ({describe_skipped(source.skipped) or 'it is empty'})")
    return source


def describe_skipped(skipped: Mapping[str, list[str]]) -> str:
    """Return the number of skipped tokens for each reason, in words."""
    return ", ".join(f"{len(tokens)} {reason}" for reason, tokens in skipped.items() if tokens)


def _read_lines(path: Path) -> TokenSource:
    """Spaces at the ends of a line belong to the token."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as problem:
        raise ValueError(f"--tokens: {path} is not UTF-8 text ({problem.reason}, byte {problem.start})") from problem
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    blank = [line for line in lines if not line.strip()]
    return _make_source(path, [t.encode() for t in lines if t.strip()], vocabulary=False, skipped={"blank": blank})


def _read_sentencepiece(path: Path) -> TokenSource:
    """Pieces that are control, unknown, unused or single bytes are skipped."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as missing:
        raise ValueError(f"{path}: reading a SentencePiece model needs `pip install coalign[vocab]`") from missing
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as problem:
        raise ValueError(f"{path} is not a SentencePiece model ({problem})") from problem
    tokens, control = [], []
    for i in range(len(model)):
        if model.is_control(i) or model.is_unknown(i) or model.is_unused(i) or model.is_byte(i):
            control.append(model.id_to_piece(i))
        else:
            tokens.append(SENTENCEPIECE.read(model.id_to_piece(i)))
    return _make_source(path, tokens, vocabulary=True, skipped={"control": control})


def _read_tokenizer_json(path: Path) -> TokenSource:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        model = description["model"]
        kind, vocabulary = model.get("type"), model["vocab"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(
            f"--tokens: {path} is not a tokenizer.json of the tokenizers library ({problem!r})"
        ) from problem
    if kind not in KINDS:
        raise ValueError(f"--tokens: {path} is a {kind} vocabulary; one of {', '.join(KINDS)} is needed")
    ranked = sorted(vocabulary, key=vocabulary.get) if kind == "BPE" else [piece for piece, _ in vocabulary]
    control = {added["content"] for added in description["added_tokens"]} | {model.get("unk_token")}
    if kind == "Unigram" and model["unk_id"] is not None:
        control.add(vocabulary[model["unk_id"]][0])
    if model.get("byte_fallback"):
        control |= {f"<0x{b:02X}>" for b in range(256)}
    alphabet = find_alphabet(description)
    tokens = [alphabet.read(token) for token in ranked if token not in control]
    return _make_source(path, tokens, vocabulary=True, skipped={"control": [t for t in ranked if t in control]})


def _make_source(path: Path, tokens: list[bytes], *, vocabulary: bool, skipped: dict[str, list[str]]) -> TokenSource:
    """Make a source of the distinct tokens; repetitions count as skipped."""
    distinct = list(dict.fromkeys(tokens))
    repeated = (Counter(tokens) - Counter(distinct)).elements()
    return TokenSource(
        path, distinct, vocabulary, skipped | {"repeated": [t.decode(errors="replace") for t in repeated]}
    )
