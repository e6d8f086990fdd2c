"""A tokenised source in a folder: arrays of fixed width, end to end, to be mapped.

    rows        i64 [rows, 2]        number in the source file, first sequence
    sequences   i64 [sequences, 2]   end in `tokens`, end in `rest`
    tokens      i32
    loss_mask   u8, empty for prompts
    rest        JSON of each sequence: its columns, and what its row has that the source's has not
    meta.json   counts, hash and number of tokens; a checksum of every other file

The rows themselves stay where they are.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from coalign.data.examples import MARKS, Example
from coalign.data.scan import Scan

ARRAYS = {"rows": np.int64, "sequences": np.int64, "tokens": np.int32, "loss_mask": np.bool_, "rest": np.uint8}
BLOCK = 1 << 20


class Damaged(ValueError):
    """A stored source that is not what was written."""


class StoredExamples:
    """What `store` wrote to ``folder``: sequences by the number of a usable row."""

    def __init__(self, folder: Path) -> None:
        """Damaged if a file is missing or has changed."""
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
            changed = [name for name, told in self.meta["checksums"].items() if checksum(folder / name) != told]
        except (OSError, ValueError, KeyError) as error:
            raise Damaged(f"{folder} cannot be read: {error}") from error
        if changed:
            raise Damaged(f"{folder}: {', '.join(changed)} is not what was written")
        arrays = {name: _mapped(folder / name, dtype) for name, dtype in ARRAYS.items()}
        self._rows, self._sequences = arrays["rows"].reshape(-1, 2), arrays["sequences"].reshape(-1, 2)
        self._tokens, self._mask, self._rest = arrays["tokens"], arrays["loss_mask"], arrays["rest"]

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        """Which row of the source file usable row ``index`` is."""
        return int(self._rows[index, 0])

    def read(self, index: int, row: Mapping[str, Any]) -> list[Example]:
        """What usable row ``index`` became; ``row`` is the source's, named."""
        first = int(self._rows[index, 1])
        last = int(self._rows[index + 1, 1]) if index + 1 < len(self) else len(self._sequences)
        return [self._example(i, row) for i in range(first, last)]

    def _example(self, i: int, row: Mapping[str, Any]) -> Example:
        token, text = self._sequences[i - 1].tolist() if i else (0, 0)
        token_end, text_end = self._sequences[i].tolist()
        rest = json.loads(self._rest[text:text_end].tobytes())
        mask = self._mask[token:token_end].tolist() if len(self._mask) else None
        return Example(self._tokens[token:token_end].tolist(), {**row, **rest["row"]}, mask, rest["columns"])


def store(folder: Path, scan: Scan) -> None:
    """Write all that ``scan`` yields to the empty ``folder``, a row at a time.

    ValueError for a row to which something was added that JSON cannot hold.
    """
    sequences = tokens = text = 0
    with ExitStack() as stack:
        out = {name: stack.enter_context((folder / name).open("wb")) for name in ARRAYS}
        for number, examples in scan:
            array("q", [number, sequences]).tofile(out["rows"])
            row = scan.examples.reader.named(scan.rows[number])
            try:
                rests = [_rest(example, row) for example in examples]
            except TypeError as error:
                raise ValueError(f"{scan.rows.where(number)}: data.cache cannot keep this row: {error}") from error
            for example, rest in zip(examples, rests, strict=True):
                sequences, tokens, text = sequences + 1, tokens + len(example.tokens), text + len(rest)
                array("q", [tokens, text]).tofile(out["sequences"])
                array("i", example.tokens).tofile(out["tokens"])
                out["loss_mask"].write(bytes(example.loss_mask or []))
                out["rest"].write(rest)
    meta = {
        "counts": dict(scan.examples.counts),
        "hash": scan.hash,
        "tokens": scan.tokens,
        "checksums": {name: checksum(folder / name) for name in ARRAYS},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def checksum(file: Path) -> str:
    """Of the file's bytes."""
    seen = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            seen.update(block)
    return seen.hexdigest()


def _rest(example: Example, row: Mapping[str, Any]) -> bytes:
    added = {k: v for k, v in example.row.items() if k not in MARKS and (k not in row or row[k] != v)}
    return json.dumps({"row": added, "columns": example.columns}).encode()


def _mapped(file: Path, dtype: Any) -> np.ndarray:
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)  # nothing cannot be mapped
