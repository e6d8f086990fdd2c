"""New pieces for a byte-pair encoding, without any change to texts that do not use them.

SentencePiece's rule, as in Chinese-LLaMA (arXiv:2304.08177): two neighbours may merge whenever their concatenation is
in the vocabulary. Every merge that makes a new piece gets a rank below all old merges. So the old merges come first,
all of them, as if nothing were new; a new merge then always makes a new piece, and no old merge takes a new piece. The
result is the old tokenisation in which some runs of neighbours have become one new token: a text without a new token in
it is tokenised as before. (Chinese-LLaMA ranks the new pieces above the old ones, which cuts old words anew.)

How tokenizers write the bytes of a token: so that tokens of one vocabulary can be spelled in another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from tokenizers import Tokenizer


class Alphabet(Protocol):
    """The spelling of tokens inside of a vocabulary."""

    def spell(self, token: bytes) -> str | None:
        """None for bytes that cannot be a token here."""
        ...

    def read(self, spelling: str) -> bytes:
        """The bytes that the token stands for in a text."""
        ...


class ByteLevel:
    """GPT-2's: one printable character for each byte, `Ġ` for a space."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [b for b in range(256) if b not in printable]
        self._letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
        self._bytes = {letter: b for b, letter in self._letters.items()}

    def spell(self, token: bytes) -> str | None:
        return "".join(self._letters[b] for b in token)

    def read(self, spelling: str) -> bytes:
        """What is not spelled in these letters stands for itself, as in the decoder of the tokenizers library."""
        if all(letter in self._bytes for letter in spelling):
            return bytes(self._bytes[letter] for letter in spelling)
        return spelling.encode()


class Characters:
    """Characters as they are, with ``space`` (SentencePiece: `▁`) for a space."""

    def __init__(self, space: str) -> None:
        self._space = space

    def spell(self, token: bytes) -> str | None:
        try:
            return token.decode().replace(" ", self._space)
        except UnicodeDecodeError:  # part of a character
            return None

    def read(self, spelling: str) -> bytes:
        return spelling.replace(self._space, " ").encode()


SENTENCEPIECE = Characters("▁")


def alphabet_of(description: dict[str, Any]) -> Alphabet:
    """The alphabet of a tokenizer.json, which its pre-tokenizer, normaliser and decoder give away."""
    around = json.dumps([description[k] for k in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"ByteLevel"' in around:
        return ByteLevel()
    return SENTENCEPIECE if "▁" in around else Characters(" ")


@dataclass(frozen=True)
class Merged:
    """tokenizer: with the new pieces. pieces: the old ids of each new piece, in the order of the new ids: first those
    asked for, then ``steps``, that lead from the old pieces of some token to it. The last two: what did not enter.
    """

    tokenizer: Tokenizer
    pieces: list[list[int]]
    steps: list[str]
    present: list[str]
    unreachable: list[str]


def merge(old: Tokenizer, tokens: list[bytes], first: int) -> Merged:
    """Give ``old`` the tokens as pieces with the ids from ``first`` on.

    Merges join two pieces at a time; where those of a token cannot be joined that way (`to t al`, and neither `tot` nor
    `tal` is a piece), the missing one enters as well. A token that nothing can reach stays out: the pre-tokenizer would
    cut it, the normaliser rewrite it, it is part of a character, or only a new way to an old piece would lead there.
    Raises ValueError for what is no BPE tokenizer.
    """
    description = json.loads(old.to_str())
    _require_plain_bpe(description["model"])
    alphabet = alphabet_of(description)
    known = old.get_vocab(with_added_tokens=True)
    wanted, present, unreachable = [], [], []
    for token in tokens:
        spelling = alphabet.spell(token)
        if spelling in known:
            present.append(token)
        elif spelling is None or not _is_one_word(old, alphabet, spelling):
            unreachable.append(token)
        else:
            wanted.append(spelling)
    while True:
        new, extended = _reach(description, known, wanted, first)
        stuck = [s for s in wanted if _parts(extended, s) != [s]]
        if not stuck:
            break
        wanted = [s for s in wanted if _parts(extended, s) == [s]]
        unreachable += [alphabet.read(s) for s in stuck]
    pieces = [[t.id for t in old.model.tokenize(spelling)] for spelling in new]
    steps = [alphabet.read(spelling) for spelling in new[len(wanted) :]]
    return Merged(extended, pieces, _show(steps), _show(present), _show(unreachable))


def _require_plain_bpe(model: dict[str, Any]) -> None:
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        kind = model["type"] if model["type"] != "BPE" else "BPE that marks the parts of words"
        raise ValueError(
            f"the model's tokenizer is {kind}: a vocabulary can be merged into a byte-level or SentencePiece BPE only; "
            "give the tokens as a text file of one token a line"
        )


def _is_one_word(tokenizer: Tokenizer, alphabet: Alphabet, spelling: str) -> bool:
    """Whether normaliser and pre-tokenizer let the token through in one piece."""
    try:
        text = alphabet.read(spelling).decode()
    except UnicodeDecodeError:  # part of a character in a byte-level vocabulary: they work on characters
        return True
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, (0, len(text)))]
    return len(words) == 1 and words[0][0].endswith(spelling)


def _reach(
    description: dict[str, Any], known: dict[str, int], wanted: list[str], first: int
) -> tuple[list[str], Tokenizer]:
    """The ``wanted`` with the steps that lead to them, and the tokenizer that has them."""
    new = list(wanted)
    while True:
        tokenizer = _extended(description, known, new, first)
        steps = dict.fromkeys(step for spelling in wanted for step in _next_steps(tokenizer, spelling))
        if not steps:
            return new, tokenizer
        new += steps


def _next_steps(tokenizer: Tokenizer, spelling: str) -> list[str]:
    """New pieces that bring the merges one step further towards ``spelling``; none where there is no further."""
    parts = _parts(tokenizer, spelling)
    if "".join(parts) != spelling:  # characters that the vocabulary has as bytes or not at all
        return [c for c in spelling if tokenizer.token_to_id(c) is None]
    joined = (a + b for a, b in pairwise(parts))
    return [step for step in joined if tokenizer.token_to_id(step) is None][:1]


def _parts(tokenizer: Tokenizer, spelling: str) -> list[str]:
    return [token.value for token in tokenizer.model.tokenize(spelling)]


def _extended(description: dict[str, Any], known: dict[str, int], new: list[str], first: int) -> Tokenizer:
    """The old added tokens enter the vocabulary under their ids: otherwise they would be numbered anew behind it."""
    model = description["model"]
    building = model["vocab"].keys() | set(new)
    merges = [[s[:i], s[i:]] for s in new for i in range(1, len(s)) if s[:i] in building and s[i:] in building]
    vocabulary = known | {s: first + i for i, s in enumerate(new)}
    model = model | {"vocab": vocabulary, "merges": model["merges"] + merges}
    return Tokenizer.from_str(json.dumps(description | {"model": model}))


def _show(tokens: list[bytes]) -> list[str]:
    return [token.decode(errors="backslashreplace") for token in tokens]
