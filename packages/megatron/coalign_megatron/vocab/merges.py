"""New pieces for a byte-pair encoding that leave the tokenisation of other texts unchanged.

The rule is SentencePiece's, as in Chinese-LLaMA (arXiv:2304.08177): two neighbours may merge if their concatenation is
in the vocabulary. Merges that make a new piece rank below all old merges. So the old merges run first, as if nothing
were new; no old merge uses a new piece. The result is the old tokenisation with some runs of neighbours replaced by one
new token. (Chinese-LLaMA ranks the new pieces above the old ones, which splits old words differently.)

Alphabets say how a vocabulary spells the bytes of a token, so that tokens can pass from one vocabulary to another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from tokenizers import Tokenizer


class Alphabet(Protocol):
    """The way a vocabulary spells the bytes of its tokens."""

    def spell(self, token: bytes) -> str | None:
        """Spell a token; None for bytes that cannot be a token of this vocabulary."""
        ...

    def read(self, spelling: str) -> bytes:
        """Return the bytes that the token stands for in a text."""
        ...


class ByteLevelAlphabet:
    """GPT-2's alphabet: one printable character for each byte, `Ġ` for a space."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        unprintable = [b for b in range(256) if b not in printable]
        self._letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(unprintable)}
        self._bytes = {letter: b for b, letter in self._letters.items()}

    def spell(self, token: bytes) -> str | None:
        return "".join(self._letters[b] for b in token)

    def read(self, spelling: str) -> bytes:
        """A spelling with other letters stands for itself, as in the decoder of the tokenizers library."""
        if all(letter in self._bytes for letter in spelling):
            return bytes(self._bytes[letter] for letter in spelling)
        return spelling.encode()


class CharacterAlphabet:
    """Plain characters, with ``space`` (SentencePiece: `▁`) for a space."""

    def __init__(self, space: str) -> None:
        self._space = space

    def spell(self, token: bytes) -> str | None:
        try:
            return token.decode().replace(" ", self._space)
        except UnicodeDecodeError:  # part of a character
            return None

    def read(self, spelling: str) -> bytes:
        return spelling.replace(self._space, " ").encode()


SENTENCEPIECE = CharacterAlphabet("▁")


def find_alphabet(description: dict[str, Any]) -> Alphabet:
    """Find the alphabet of a tokenizer.json from its pre-tokenizer, normaliser and decoder."""
    around = json.dumps([description[k] for k in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"ByteLevel"' in around:
        return ByteLevelAlphabet()
    return SENTENCEPIECE if "▁" in around else CharacterAlphabet(" ")


@dataclass(frozen=True)
class MergedVocabulary:
    """A tokenizer with new pieces.

    pieces: the old ids of each new piece, in the order of the new ids: first the requested ones, then ``steps``, the
    intermediate pieces that merges need. present: tokens that were there before. unreachable: tokens left out.
    """

    tokenizer: Tokenizer
    pieces: list[list[int]]
    steps: list[str]
    present: list[str]
    unreachable: list[str]


def merge_tokens(old: Tokenizer, tokens: list[bytes], first: int) -> MergedVocabulary:
    """Return ``old`` with the tokens as pieces, whose ids start at ``first``.

    A merge joins two pieces. If a token needs an intermediate piece (`to t al`, where neither `tot` nor `tal` is a
    piece), that is added as well. A token that merges cannot reach is left out: the pre-tokenizer splits it, the
    normaliser rewrites it, it is part of a character, or it needs a new merge for an old piece.
    Raises ValueError if the tokenizer is no plain BPE.
    """
    description = json.loads(old.to_str())
    _require_plain_bpe(description["model"])
    alphabet = find_alphabet(description)
    vocabulary = old.get_vocab(with_added_tokens=True)
    wanted, present, unreachable = [], [], []
    for token in tokens:
        spelling = alphabet.spell(token)
        if spelling in vocabulary:
            present.append(token)
        elif spelling is None or not _is_one_word(old, alphabet, spelling):
            unreachable.append(token)
        else:
            wanted.append(spelling)
    while True:
        new, extended = _reach(description, vocabulary, wanted, first)
        stuck = [s for s in wanted if _split(extended, s) != [s]]
        if not stuck:
            break
        wanted = [s for s in wanted if _split(extended, s) == [s]]
        unreachable += [alphabet.read(s) for s in stuck]
    pieces = [[t.id for t in old.model.tokenize(spelling)] for spelling in new]
    steps = [alphabet.read(spelling) for spelling in new[len(wanted) :]]
    return MergedVocabulary(extended, pieces, _show(steps), _show(present), _show(unreachable))


def _require_plain_bpe(model: dict[str, Any]) -> None:
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        name = model["type"] if model["type"] != "BPE" else "BPE with marked parts of words"
        raise ValueError(
            f"the model's tokenizer is {name}: a vocabulary can be merged into a byte-level or SentencePiece BPE only; "
            "give the tokens as a text file of one token a line"
        )


def _is_one_word(tokenizer: Tokenizer, alphabet: Alphabet, spelling: str) -> bool:
    """Whether normaliser and pre-tokenizer keep the token in one piece."""
    try:
        text = alphabet.read(spelling).decode()
    except UnicodeDecodeError:  # part of a character in a byte-level vocabulary: they work on characters
        return True
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, (0, len(text)))]
    return len(words) == 1 and words[0][0].endswith(spelling)


def _reach(
    description: dict[str, Any], vocabulary: dict[str, int], wanted: list[str], first: int
) -> tuple[list[str], Tokenizer]:
    """Return the ``wanted`` pieces followed by the steps that they need, and the tokenizer that has all of them."""
    new = list(wanted)
    while True:
        tokenizer = _extend(description, vocabulary, new, first)
        steps = dict.fromkeys(step for spelling in wanted for step in _next_steps(tokenizer, spelling))
        if not steps:
            return new, tokenizer
        new += steps


def _next_steps(tokenizer: Tokenizer, spelling: str) -> list[str]:
    """Return new pieces that bring the merges one step closer to ``spelling``; none if no piece does."""
    pieces = _split(tokenizer, spelling)
    if "".join(pieces) != spelling:  # characters that the vocabulary has as bytes or not at all
        return [c for c in spelling if tokenizer.token_to_id(c) is None]
    joined = (a + b for a, b in pairwise(pieces))
    return [step for step in joined if tokenizer.token_to_id(step) is None][:1]


def _split(tokenizer: Tokenizer, spelling: str) -> list[str]:
    return [token.value for token in tokenizer.model.tokenize(spelling)]


def _extend(description: dict[str, Any], vocabulary: dict[str, int], new: list[str], first: int) -> Tokenizer:
    """Old added tokens enter the vocabulary with their ids; otherwise the library would give them new ones."""
    model = description["model"]
    building = model["vocab"].keys() | set(new)
    merges = [[s[:i], s[i:]] for s in new for i in range(1, len(s)) if s[:i] in building and s[i:] in building]
    extended = vocabulary | {s: first + i for i, s in enumerate(new)}
    model = model | {"vocab": extended, "merges": model["merges"] + merges}
    return Tokenizer.from_str(json.dumps(description | {"model": model}))


def _show(tokens: list[bytes]) -> list[str]:
    return [token.decode(errors="backslashreplace") for token in tokens]
