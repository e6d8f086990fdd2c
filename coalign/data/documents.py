"""Documents to learn from token by token (pre-training)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coalign.data.examples import Example, Examples
from coalign.data.sources import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DocumentSource(Examples):
    """Rows as documents: one BOS if the tokenizer adds one, the text under ``data.text_key``, one EOS.

    Every token is trained except the first. A document of more than ``data.max_tokens`` tokens becomes several
    sequences (column ``index``); each begins with the last token of the one before, as context only, so every token is
    still trained once.
    """

    longest = "max_tokens"
    from_tokens = True
    counted = {"split": "of these cut into pieces"}

    def encode(self, row: dict[str, Any]) -> list[Example]:
        key = self.config.text_key
        text = self.reader.value(row, key)
        if not isinstance(text, str):
            raise BadRow(f"'{key}' is {type(text).__name__}; expected a string")
        if not text.strip():
            raise BadRow(f"'{key}' is empty", "empty")
        tokens = document(text, self.template.tokenizer)
        size = self.max_tokens or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, max(1, len(tokens) - 1), max(1, size - 1))]
        return [Example(piece, dict(row), [True] * len(piece), {"index": i}) for i, piece in enumerate(pieces)]

    def count(self, examples: list[Example]) -> dict[str, int]:
        return {"split": int(len(examples) > 1)}


def document(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a document, with exactly one EOS at the end, and exactly one BOS in front if the tokenizer adds one
    or the text brings it."""
    tokens = tokenizer(text, verbose=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = tokens[:1] == [bos]
    while tokens and tokens[0] == bos:
        tokens = tokens[1:]
    while tokens and tokens[-1] == eos:
        tokens = tokens[:-1]
    return [bos] * begins + tokens + [eos]
