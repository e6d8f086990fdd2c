"""How tokenizers write the bytes of a token: so that tokens of one vocabulary can be spelled in another."""

from __future__ import annotations

import json
from typing import Any, Protocol


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
