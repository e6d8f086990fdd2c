"""Turns tokens into text as they come: for answers that are shown or sent before they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a tokenizer decodes from an incomplete character


def decode_answer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return the text of an answer, without special tokens."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a list only comes from a batch
    return text


class TextStream:
    """Writes the text of tokens in pieces, up to the first of the strings ``stops``.

    A character is held back until its last byte is there, and what may begin a stop string until it is known to be
    none. Each token is decoded with those of the piece before it alone, which give it its context.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], write: Callable[[str], Any], stops: Sequence[str] = ()
    ) -> None:
        self._decode, self._write, self._stops = decode, write, stops
        self._tokens: list[int] = []
        self._context = self._done = 0  # tokens[context:done] are the piece before, tokens[done:] those not yet decoded
        self._held = ""  # decoded and not yet written
        self._text = ""
        self._is_over = False  # a stop string has come

    def push(self, token: int) -> None:
        self._tokens.append(token)
        piece = self._decode_new()
        if not piece.endswith(UNFINISHED):
            self._context, self._done = self._done, len(self._tokens)
            self._add(piece)

    def end(self) -> str:
        """Write what was held back; return the whole text."""
        self._add(self._decode_new())
        self._done = len(self._tokens)
        self._put(self._held)
        self._held = ""
        return self._text

    def _decode_new(self) -> str:
        if self._done == len(self._tokens):
            return ""
        return self._decode(self._tokens[self._context :])[
            len(self._decode(self._tokens[self._context : self._done])) :
        ]

    def _add(self, piece: str) -> None:
        if self._is_over:
            return
        self._held += piece
        positions = [at for at in map(self._held.find, self._stops) if at >= 0]
        if positions:
            self._is_over = True
            self._put(self._held[: min(positions)])
            self._held = ""
            return
        kept = max((_count_stop_prefix(self._held, stop) for stop in self._stops), default=0)
        self._put(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]

    def _put(self, text: str) -> None:
        if text:
            self._write(text)
            self._text += text


def _count_stop_prefix(text: str, stop: str) -> int:
    """Count the characters at the end of ``text`` that ``stop`` begins with, less than all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the strings ``stops``."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
