"""Where new tokens come from: a list, a tokenizers vocabulary, a SentencePiece model.

The pieces of a SentencePiece model.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from coalign.vocab.merges import SENTENCEPIECE, alphabet_of


def pieces(path: Path) -> tuple[list[str], list[str]]:
    """Pieces that stand for text, best first, and those that do not: control, unknown, unused and byte pieces.

    Raises ValueError where the package `sentencepiece` is missing, or the file is no such model.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as missing:
        raise ValueError(f"{path}: reading a SentencePiece model needs `pip install coalign[vocab]`") from missing
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as problem:
        raise ValueError(f"{path} is not a SentencePiece model ({problem})") from problem
    text, control = [], []
    for i in range(len(model)):
        apart = model.is_control(i) or model.is_unknown(i) or model.is_unused(i) or model.is_byte(i)
        (control if apart else text).append(model.id_to_piece(i))
    return text, control


KINDS = ("BPE", "Unigram")


@dataclass(frozen=True)
class TokenSource:
    """Tokens as the bytes they stand for, each once, the most useful first.

    vocabulary: they are pieces that some tokenizer builds words of, not strings that somebody asked for by name.
    skipped: why -> what was left out.
    """

    path: Path
    tokens: list[bytes]
    vocabulary: bool
    skipped: dict[str, list[str]] = field(default_factory=dict)


def read(path: Path) -> TokenSource:
    """A `.model` file is SentencePiece's, a `.json` file a tokenizer.json, any other a text file of one token a line.

    Raises FileNotFoundError, and ValueError for a file that is not what its name says or holds no token.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--tokens: {path} is not a file")
    source = {".model": _sentencepiece, ".json": _tokenizers}.get(path.suffix, _lines)(path)
    if not source.tokens:
        raise ValueError(f"--tokens: {path} holds no tokens ({_why(source.skipped)})")
    return source


def _lines(path: Path) -> TokenSource:
    """Spaces at the ends of a line belong to the token."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as problem:
        raise ValueError(f"--tokens: {path} is not UTF-8 text ({problem.reason}, byte {problem.start})") from problem
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    tokens = [line for line in lines if line.strip()]
    blank = [line for line in lines if not line.strip()]
    return _source(path, [t.encode() for t in tokens], vocabulary=False, skipped={"blank": blank})


def _sentencepiece(path: Path) -> TokenSource:
    text, control = pieces(path)
    return _source(path, [SENTENCEPIECE.read(p) for p in text], vocabulary=True, skipped={"control": control})


def _tokenizers(path: Path) -> TokenSource:
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
    alphabet = alphabet_of(description)
    tokens = [alphabet.read(token) for token in ranked if token not in control]
    return _source(path, tokens, vocabulary=True, skipped={"control": [t for t in ranked if t in control]})


def _source(path: Path, tokens: list[bytes], *, vocabulary: bool, skipped: dict[str, list[str]]) -> TokenSource:
    """With what is named twice taken once."""
    once = list(dict.fromkeys(tokens))
    repeated = Counter(tokens) - Counter(once)
    return TokenSource(
        path, once, vocabulary, skipped | {"repeated": [t.decode(errors="replace") for t in repeated.elements()]}
    )


def _why(skipped: dict[str, list[str]]) -> str:
    return ", ".join(f"{len(what)} {why}" for why, what in skipped.items() if what) or "it is empty"
