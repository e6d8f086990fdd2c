"""The documents of an indexed dataset as a source for training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from coalign.data.examples import MARKS, Example
from coalign.data.indexed.format import IndexedTokens, name_files
from coalign.data.shuffle import DataPhase

SAMPLED = 1 << 20  # tokens at each end of a file that its fingerprint covers, besides the index


def find_prefix(path: str | Path) -> Path | None:
    """Return the prefix of an indexed dataset from PREFIX.idx or PREFIX.bin; None for any other path."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else None


class IndexedDocuments:
    """An ExampleSource whose rows are documents, or pieces of documents of more than ``max_tokens`` tokens.

    A piece begins with the last token of the one before, as context only, so each token but a document's first is
    trained once.
    """

    def __init__(
        self,
        data: IndexedTokens,
        vocabulary: int,
        *,
        max_tokens: int | None = None,
        phase: DataPhase | None = None,
        max_samples: int | None = None,
    ) -> None:
        """``vocabulary`` is its size in tokens. ValueError if no document is usable."""
        self.name = data.prefix.name
        self._data, self._vocabulary = data, vocabulary
        numbers: Iterable[int] = range(len(data) if max_samples is None else min(len(data), max_samples))
        if phase is not None:
            numbers = (number for number in numbers if number in phase)
        self._documents = np.fromiter(numbers, np.int64)
        sizes = np.diff(data.ends)[self._documents]
        self._max_tokens = max(2, max_tokens or int(sizes.max(initial=2)))
        self._seen, self._left_out = len(sizes), int((sizes < 2).sum())
        self._documents, sizes = self._documents[sizes >= 2], sizes[sizes >= 2]
        pieces = -(-(sizes - 1) // (self._max_tokens - 1))
        self._ends = np.cumsum(pieces)
        self.tokens = int((sizes + pieces - 1).sum())
        if not len(self):
            raise ValueError(f"{self.name} has no usable rows ({self.report()})")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> list[Example]:
        """ValueError for a token outside the vocabulary."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        document, piece = int(self._documents[which]), index - (int(self._ends[which - 1]) if which else 0)
        start = piece * (self._max_tokens - 1)
        tokens = self._data.read(document, start, start + self._max_tokens)
        if (largest := int(tokens.max())) >= self._vocabulary:
            raise ValueError(
                f"{self.name}, document {document}: token {largest}, but the tokenizer has {self._vocabulary}; "
                "was it made with another one?"
            )
        row: dict[str, Any] = dict(zip(MARKS, (self.name, document), strict=True))
        return [Example(tokens.tolist(), row, [False] + [True] * (len(tokens) - 1), {"index": piece})]

    def report(self) -> str:
        left_out = f", {self._left_out} of less than two tokens left out" if self._left_out else ""
        cut = f", in {len(self)} pieces of up to {self._max_tokens} tokens" if len(self) > len(self._documents) else ""
        return f"{self._seen} documents: {len(self._documents)} used{cut}{left_out}"

    def fingerprint(self) -> dict[str, Any]:
        seen = xxhash.xxh3_128(name_files(self._data.prefix)[1].read_bytes())
        for part in (slice(0, SAMPLED), slice(-SAMPLED, None)):
            seen.update(self._data.flat[part].tobytes())
        seen.update(f"{self._max_tokens} {self._seen}".encode())
        return {"name": self.name, "rows": len(self), "hash": seen.hexdigest()}
