"""Documents of an indexed dataset as a source to learn from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from coalign.data.examples import MARKS, Example
from coalign.data.indexed.format import IndexedTokens, name_files
from coalign.data.shuffle import DataPhase

SAMPLED = 1 << 20  # tokens at each end of a file that its fingerprint is made of, beside its index


def find_prefix(path: str | Path) -> Path | None:
    """The prefix of the indexed dataset that ``path`` (PREFIX.idx or PREFIX.bin) names; None if it names none."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else None


class IndexedDocuments:
    """A Source (coalign.data.scan): documents of more than ``most`` tokens are cut into pieces, and each piece is a row
    of its own. A piece begins with the last token of the one before, as context only, so every token but a document's
    first is trained once."""

    def __init__(
        self,
        data: IndexedTokens,
        vocabulary: int,
        *,
        most: int | None = None,
        phase: DataPhase | None = None,
        max_samples: int | None = None,
    ) -> None:
        """``vocabulary``: token ids there are. ValueError if no document is left."""
        self.name = data.prefix.name
        self._data, self._vocabulary = data, vocabulary
        wanted: Iterable[int] = range(len(data) if max_samples is None else min(len(data), max_samples))
        if phase is not None:
            wanted = (number for number in wanted if number in phase)
        self._documents = np.fromiter(wanted, np.int64)
        sizes = np.diff(data.ends)[self._documents]
        self._most = max(2, most or int(sizes.max(initial=2)))
        self._seen, self._left_out = len(sizes), int((sizes < 2).sum())
        self._documents, sizes = self._documents[sizes >= 2], sizes[sizes >= 2]
        pieces = -(-(sizes - 1) // (self._most - 1))
        self._ends = np.cumsum(pieces)
        self.tokens = int((sizes + pieces - 1).sum())
        if not len(self):
            raise ValueError(f"{self.name} has no usable rows ({self.report()})")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> list[Example]:
        """ValueError for a token that the vocabulary does not have."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        document, piece = int(self._documents[which]), index - (int(self._ends[which - 1]) if which else 0)
        start = piece * (self._most - 1)
        tokens = self._data.read(document, start, start + self._most)
        if (largest := int(tokens.max())) >= self._vocabulary:
            raise ValueError(
                f"{self.name}, document {document}: token {largest}, but the tokenizer has {self._vocabulary}; "
                "was it made with another one?"
            )
        row: dict[str, Any] = dict(zip(MARKS, (self.name, document), strict=True))
        return [Example(tokens.tolist(), row, [False] + [True] * (len(tokens) - 1), {"index": piece})]

    def report(self) -> str:
        left_out = f", {self._left_out} of less than two tokens left out" if self._left_out else ""
        cut = f", in {len(self)} pieces of up to {self._most} tokens" if len(self) > len(self._documents) else ""
        return f"{self._seen} documents: {len(self._documents)} used{cut}{left_out}"

    def fingerprint(self) -> dict[str, Any]:
        seen = xxhash.xxh3_128(name_files(self._data.prefix)[1].read_bytes())
        for part in (slice(0, SAMPLED), slice(-SAMPLED, None)):
            seen.update(self._data.flat[part].tobytes())
        seen.update(f"{self._most} {self._seen}".encode())
        return {"name": self.name, "rows": len(self), "hash": seen.hexdigest()}
