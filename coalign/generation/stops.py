"""Stop strings, found across token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decoder = Callable[[Sequence[str]], Callable[[list[int]], str]]  # from stop strings to tokens -> the text to search
_PARTIAL = "\ufffd"  # what a tokenizer prints for a character whose bytes are not all there yet


class StopFinder:
    """Watches one response as it grows.

    ``decode`` turns token ids into text. Only the last few tokens are decoded at each step: what they add to the
    text of the tokens before them (a decoder may treat the first token of a text in its own way).
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops = stops
        self.decode = decode
        self.keep = max(map(len, stops)) - 1
        self.tokens: list[int] = []
        self.context = 0  # tokens[context:done] have been decoded and give the new ones their context
        self.done = 0
        self.tail = ""

    def push(self, token: int) -> bool:
        """Add the response's next token; True if a stop string is now complete."""
        self.tokens.append(token)
        before = self.decode(self.tokens[self.context : self.done])
        text = self.tail + self.decode(self.tokens[self.context :])[len(before) :]
        if any(stop in text for stop in self.stops):
            return True
        if not text.endswith(_PARTIAL):
            self.context, self.done = self.done, len(self.tokens)
            self.tail = text[-self.keep :] if self.keep else ""
        return False
