"""New tokens in a tokenizer: pieces of a vocabulary become BPE merges, strings of a list become added tokens.

Text without any of them is tokenised as before. A piece is found where the old pieces of a text join to it. An added
token is found wherever its characters stand, inside words too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from coalign.files import describe_problem, read_json_object
from coalign_megatron.vocab.merges import SENTENCEPIECE, find_alphabet, merge_tokens

MODEL_TYPES = ("BPE", "Unigram")


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
        model: Any = SentencePieceProcessor(model_file=str(path))  # pyright: ignore[reportCallIssue] (made on import)
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
        description = read_json_object(path)
        if (model_type := description["model"]["type"]) not in MODEL_TYPES:
            raise ValueError(f"a {model_type!s:.30} vocabulary; one of {', '.join(MODEL_TYPES)} is needed")
        return _read_vocabulary(path, description)
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        reason = describe_problem(problem)
        raise ValueError(f"--tokens: {path} is not a tokenizer.json of the tokenizers library ({reason})") from problem


def _read_vocabulary(path: Path, description: dict[str, Any]) -> TokenSource:
    model = description["model"]
    model_type, vocabulary = model["type"], model["vocab"]
    ranked = sorted(vocabulary, key=vocabulary.get) if model_type == "BPE" else [piece for piece, _ in vocabulary]
    control = {added["content"] for added in description["added_tokens"]} | {model.get("unk_token")}
    if model_type == "Unigram" and model["unk_id"] is not None:
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


VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class TokenizerExtension:
    """The tokens that were added to a tokenizer.

    first: id of the first new token; the others follow it. pieces: for each new token, its ids in the old tokenizer
    (empty if that knows none of it). steps: the last of the new tokens, which the source did not list, but which merges
    need (coalign_megatron.vocab.merges). skipped: reason -> tokens of the source that were not added.
    """

    first: int
    pieces: list[list[int]]
    steps: list[str]
    skipped: dict[str, list[str]]


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model directory. Raises ValueError if there is none, or if it is written in Python."""
    # Without a vocabulary, transformers makes an empty tokenizer of some classes.
    if not any(file for pattern in VOCABULARIES for file in directory.glob(pattern)):
        raise ValueError(f"{directory} has no tokenizer (none of {', '.join(VOCABULARIES)})")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{directory}: the tokenizer ({type(tokenizer).__name__}) is written in Python; convert it to a "
            "tokenizer.json of the tokenizers library first"
        )
    return tokenizer


def extend_tokenizer(tokenizer: PreTrainedTokenizerFast, source: TokenSource, *, special: bool) -> TokenizerExtension:
    """Add the tokens of ``source`` to ``tokenizer`` in place.

    special: decoded texts omit the tokens, as they do an end-of-turn marker; for a list only. Raises ValueError if
    no token is new, or if the tokenizer cannot be extended this way.
    """
    if source.vocabulary and special:
        raise ValueError(f"--special is for a list of tokens; {source.path} is a vocabulary")
    first = max(tokenizer.get_vocab().values()) + 1
    tokens = _merge(tokenizer, source, first) if source.vocabulary else _add(tokenizer, source, first, special)
    if not tokens.pieces:
        skipped = describe_skipped(tokens.skipped)
        raise ValueError(f"--tokens: {source.path} has no token that is new to the tokenizer ({skipped})")
    return tokens


def _merge(tokenizer: PreTrainedTokenizerFast, source: TokenSource, first: int) -> TokenizerExtension:
    backend = tokenizer.backend_tokenizer
    merged = merge_tokens(backend, source.tokens, first)
    backend.model = merged.tokenizer.model
    skipped = source.skipped | {"already there": merged.present, "out of reach": merged.unreachable}
    return TokenizerExtension(first, _drop_unknown(tokenizer, merged.pieces), merged.steps, skipped)


def _add(tokenizer: PreTrainedTokenizerFast, source: TokenSource, first: int, special: bool) -> TokenizerExtension:
    """The tokens are not normalised: a text contains one exactly if its characters stand in it."""
    backend, vocabulary = tokenizer.backend_tokenizer, tokenizer.get_vocab()
    alphabet = find_alphabet(json.loads(backend.to_str()))
    new, present, garbled = [], [], []
    for text in (token.decode() for token in source.tokens):
        if text in vocabulary or alphabet.spell(text.encode()) in vocabulary:
            present.append(text)
        # A byte-level decoder takes the Latin-1 letters of an added token for bytes.
        elif backend.decoder is None or backend.decoder.decode(["a", text]).endswith(text):
            new.append(text)
        else:
            garbled.append(text)
    # By the model alone: the whole tokenizer of a SentencePiece vocabulary would put a space before each token.
    pieces = [[piece.id for piece in backend.model.tokenize(alphabet.spell(t.encode()))] for t in new]
    added: list[str | AddedToken] = [AddedToken(t, normalized=False, special=special) for t in new]
    tokenizer.add_tokens(added, special_tokens=special)
    if tokenizer.convert_tokens_to_ids(new) != list(range(first, first + len(new))):
        raise ValueError(
            f"{tokenizer.name_or_path}: the ids of the tokenizer have gaps below its last one, {first - 1}. New tokens "
            "would get these ids, and with them rows of the model that may have a meaning"
        )
    skipped = source.skipped | {"already there": present, "garbled by decoding": garbled}
    return TokenizerExtension(first, _drop_unknown(tokenizer, pieces), [], skipped)


def _drop_unknown(tokenizer: PreTrainedTokenizerFast, pieces: list[list[int]]) -> list[list[int]]:
    unknown = tokenizer.unk_token_id
    return [[i for i in ids if i != unknown] for ids in pieces]


def check_saved_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ValueError if the tokenizer written to ``directory`` loads with other contents."""
    if load_tokenizer(directory).backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise ValueError(f"transformers rebuilds the tokenizer ({type(tokenizer).__name__}) other than it was")


def count_tokens(tokenizer: PreTrainedTokenizerFast, text: Path) -> int:
    """Count the tokens of a text file, line by line."""
    with text.open(encoding="utf-8") as lines:
        return sum(len(tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"]) for line in lines)
