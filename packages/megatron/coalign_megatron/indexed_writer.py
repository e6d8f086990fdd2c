"""Writes Megatron's indexed datasets, which `coalign_megatron.indexed` reads and describes."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from coalign_megatron.indexed import CODES, HEADER, MAGIC, IndexedTokens, name_files

SMALL = 65500  # Megatron stores ids of smaller vocabularies in 16 bits


def choose_dtype(vocabulary: int) -> np.dtype:
    """Return the type in which Megatron stores token ids of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocabulary < SMALL else np.int32)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx, which appear only when the context is left without an error."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self._code = next(code for code, dtype_of_code in CODES.items() if dtype_of_code == self.dtype)
        self._lengths, self._documents = array("i"), array("q", [0])
        self._bin, self._idx = (file.with_name(f"{file.name}.part") for file in name_files(prefix))

    def __enter__(self) -> IndexedWriter:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._bin.open("wb")
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error_type is None:
                self._finish()
        finally:
            self._file.close()
            for file in (self._bin, self._idx):
                file.unlink(missing_ok=True)

    def add(self, document: Sequence[int]) -> None:
        """Write a document of one sequence. ValueError for a token that the type cannot represent."""
        tokens = np.asarray(document, np.int64)
        info = np.iinfo(self.dtype)
        if len(tokens) and (int(tokens.min()) < info.min or int(tokens.max()) > info.max):
            raise ValueError(f"token ids {tokens.min()} to {tokens.max()} do not fit into {self.dtype}")
        self._file.write(tokens.astype(self.dtype).tobytes())
        self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def extend(self, dataset: IndexedTokens) -> None:
        """Write all documents of another dataset. ValueError if its tokens have another type."""
        if dataset.dtype != self.dtype:
            raise ValueError(f"{dataset.prefix} holds {dataset.dtype}, the others {self.dtype}: they cannot be merged")
        with name_files(dataset.prefix)[0].open("rb") as source:
            shutil.copyfileobj(source, self._file, 1 << 24)
        self._documents.extend((dataset.documents[1:] + len(self._lengths)).tolist())
        self._lengths.extend(dataset.lengths.tolist())

    def _finish(self) -> None:
        lengths = np.array(self._lengths, "<i4")
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        with self._idx.open("wb") as out:
            out.write(HEADER.pack(MAGIC, 1, self._code, len(lengths), len(self._documents)))
            for column in (lengths, (ends - lengths * self.dtype.itemsize).astype("<i8")):
                out.write(column.tobytes())
            out.write(np.array(self._documents, "<i8").tobytes())
            _flush(out)
        _flush(self._file)
        data, index = name_files(self.prefix)
        index.unlink(missing_ok=True)  # otherwise an old index could describe the new tokens
        os.replace(self._bin, data)
        os.replace(self._idx, index)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
