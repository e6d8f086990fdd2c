"""Reads Megatron's indexed datasets: PREFIX.bin holds token ids, PREFIX.idx the positions of documents.

IndexedDocuments makes their documents a source for training.

The index, little endian: 9 bytes MAGIC, u64 version (1), u8 code of the tokens' type, u64 sequences, u64 documents + 1,
i32 length of each sequence, i64 offset in bytes of each, i64 first sequence of each document and the end of the last
one (megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from coalign.data.examples import MARKS, Example
from coalign.data.shuffle import DataPhase
from coalign.files import WatchedFiles, hash_file, hash_samples
from coalign.types import SOURCE_KEY

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}


def name_files(prefix: Path) -> tuple[Path, Path]:
    """Return the paths PREFIX.bin and PREFIX.idx."""
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


class IndexedTokens:
    """The indexed dataset at ``prefix``, mapped.

    ``lengths`` i32[S] of sequences; ``documents`` i64[D + 1], the first sequence of each document; ``ends`` i64[D + 1],
    the first token of each document in ``flat``, all tokens.
    """

    def __init__(self, prefix: Path) -> None:
        """FileNotFoundError, or ValueError for inconsistent files."""
        self.prefix = prefix
        data, index = name_files(prefix)
        self._watched = WatchedFiles((data, index))
        raw = np.memmap(index, np.uint8, mode="r") if index.stat().st_size else np.zeros(0, np.uint8)
        magic, version, code, sequences, documents = (
            HEADER.unpack(raw[: HEADER.size].tobytes()) if len(raw) >= HEADER.size else (b"", 0, 0, 0, 0)
        )
        if (magic, version) != (MAGIC, 1) or code not in CODES:
            raise ValueError(f"{index} is no index of an indexed dataset (version 1)")
        sizes = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
        if len(raw) not in (sizes[-1], sizes[-1] + sequences):  # multimodal data add a mode per sequence
            raise ValueError(f"{index} has {len(raw):,} bytes; {sizes[-1]:,} are what its header tells of")
        self.dtype = np.dtype(CODES[code])
        self.lengths = raw[sizes[0] : sizes[1]].view("<i4")
        self.documents = raw[sizes[2] : sizes[3]].view("<i8")
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        if not np.array_equal(raw[sizes[1] : sizes[2]].view("<i8"), starts[:-1] * self.dtype.itemsize):
            raise ValueError(f"{index}: its sequences do not lie one after the other")
        if (
            not documents
            or self.documents[0] != 0
            or self.documents[-1] != sequences
            or bool((np.diff(self.documents) < 0).any())
        ):
            raise ValueError(f"{index}: its documents do not follow one another from the first sequence to the last")
        if (actual := data.stat().st_size) != (expected := int(starts[-1]) * self.dtype.itemsize):
            raise ValueError(f"{data} has {actual:,} bytes; its index tells of {expected:,}")
        self.ends = starts[self.documents]
        self.flat = np.memmap(data, self.dtype, mode="r") if actual else np.zeros(0, self.dtype)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    @property
    def tokens(self) -> int:
        return len(self.flat)

    def __getitem__(self, document: int) -> np.ndarray:
        """Return the tokens of a document [T], mapped."""
        return self.read(document)

    def read(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens ``start`` to ``stop`` of a document, mapped. ValueError if the files have changed."""
        self._watched.check()
        first, last = int(self.ends[document]), int(self.ends[document + 1])
        return self.flat[first + start : last if stop is None else min(first + stop, last)]


class IndexedDocuments:
    """A source for ShuffledOrder whose rows are documents, or pieces of documents of more than ``max_tokens`` tokens.

    A piece begins with the last token of the one before, as context only, so each token but a document's first is
    trained once.
    """

    def __init__(
        self,
        prefix: Path,
        vocabulary: int,
        *,
        max_tokens: int | None = None,
        phase: DataPhase | None = None,
        max_samples: int | None = None,
        source: str = "",
    ) -> None:
        """``vocabulary`` is its size in tokens, ``source`` the rows' source. ValueError if no document is usable."""
        self.name, self._source = prefix.name, source
        self._data, self._vocabulary = IndexedTokens(prefix), vocabulary
        data = self._data
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
        row: dict[str, Any] = dict(zip(MARKS, (self.name, document), strict=False)) | {SOURCE_KEY: self._source}
        return [Example(tokens.tolist(), row, [False] + [True] * (len(tokens) - 1), {"index": piece})]

    def report(self) -> str:
        left_out = f", {self._left_out} of less than two tokens left out" if self._left_out else ""
        cut = f", in {len(self)} pieces of up to {self._max_tokens} tokens" if len(self) > len(self._documents) else ""
        return f"{self._seen} documents: {len(self._documents)} used{cut}{left_out}"

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "rows": len(self), "hash": self._hash}

    @cached_property
    def _hash(self) -> str:
        data, index = name_files(self._data.prefix)
        contents = f"{hash_file(index)} {hash_samples(data)} {self._max_tokens} {self._seen}"
        return xxhash.xxh3_128_hexdigest(contents.encode())
