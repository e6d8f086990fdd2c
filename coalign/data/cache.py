"""Tokenised sources on disk: going through a source costs minutes, mapping what came of it nothing.

An entry is found by its contents (the bytes of the files, the tokenizer, the template, the kind of rows, the keys that
say how rows are read, and this package's code), so it can never be out of date, only absent.

A tokenised source in a folder: arrays of fixed width, end to end, to be mapped.

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
import logging
import os
import shutil
import tempfile
import uuid
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.examples import MARKS, Example, RowEncoder
from coalign.data.scan import SourceScan, check_usable, describe_rows
from coalign.data.shuffle import DataPhase
from coalign.data.sources import FileRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ARRAYS = {"rows": np.int64, "sequences": np.int64, "tokens": np.int32, "loss_mask": np.bool_, "rest": np.uint8}
BLOCK = 1 << 20


class DamagedCache(ValueError):
    """A stored source that is not what was written."""


class ExampleStore:
    """What `store` wrote to ``folder``: sequences by the number of a usable row."""

    def __init__(self, folder: Path) -> None:
        """Damaged if a file is missing or has changed."""
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
            changed = [name for name, told in self.meta["checksums"].items() if hash_file(folder / name) != told]
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCache(f"{folder} cannot be read: {error}") from error
        if changed:
            raise DamagedCache(f"{folder}: {', '.join(changed)} is not what was written")
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


def store_examples(folder: Path, scan: SourceScan) -> None:
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
        "checksums": {name: hash_file(folder / name) for name in ARRAYS},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def hash_file(file: Path) -> str:
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


log = logging.getLogger(__name__)

# What decides which rows are drawn when, not what a row becomes. The phase counts by its share.
WHICH = {"train", "eval", "mixing", "phases", "phase", "stream", "stream_window", "cache", "shuffle"}


class CachedSource:
    """A Source whose rows have been tokenised before. Draws exactly what `Scanned` would."""

    def __init__(self, examples: RowEncoder, rows: FileRows, phase: DataPhase | None, stored: ExampleStore) -> None:
        """ValueError if it holds no usable row."""
        examples.counts = Counter(stored.meta["counts"])
        self.name, self.tokens = examples.name, stored.meta["tokens"]
        self._examples, self._rows, self._phase, self._stored = examples, rows, phase, stored
        check_usable(self, examples)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._stored.number(index)
        row = self._examples.reader.named(self._rows[number])
        return self._examples.marked(self._stored.read(index, row), number)

    def report(self) -> str:
        return f"{describe_rows(self._examples, self._phase, len(self._rows))}: {self._examples.report()}"

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "rows": len(self), "hash": self._stored.meta["hash"]}


def open_cached(
    directory: Path, examples: RowEncoder, rows: FileRows, phase: DataPhase | None, identity: str
) -> CachedSource:
    """The source as ``directory`` has it; tokenised and put there first if it has not, or if that was damaged.

    ``identity`` is `identify` with the `contents`. Processes may do this at once: the first entry to be complete is
    used.
    """
    entry = directory / f"{rows.paths[0].stem}-{_digest([identity, _code()])}"
    if entry.exists():
        try:
            return CachedSource(examples, rows, phase, ExampleStore(entry))
        except DamagedCache as error:
            log.warning("data.cache: %s; tokenising %s again", error, examples.name)
            _remove(entry)
    else:
        log.info("data.cache: %s has no %s of this content, tokenizer and keys; tokenising", directory, examples.name)
    with _aside(directory) as folder:
        store_examples(folder, SourceScan(examples, rows, phase))
        try:
            os.rename(folder, entry)
        except OSError:
            if not entry.exists():  # else another process was first
                raise
    return CachedSource(examples, rows, phase, ExampleStore(entry))


def hash_settings(
    examples: RowEncoder, config: DataConfig, source: SourceConfig, phase: DataPhase | None, files: Any
) -> str:
    """A hash of all that decides what the rows of a source become; ``files`` says what is known of their contents."""
    return _digest(
        [
            type(examples).__qualname__,
            type(examples.template).__qualname__,
            examples.template.jinja,
            _tokenizer(examples.template.tokenizer),
            config.model_dump(exclude=WHICH, exclude_defaults=True),
            source.model_dump(exclude={"path", "weight"}, exclude_defaults=True),
            phase.share if phase else None,
            files,
        ]
    )


def hash_files(rows: FileRows) -> list[str]:
    """Of each file, a hash of its bytes."""
    return [hash_file(file) for path in rows.paths for file in _files(path)]


def list_file_sizes(rows: FileRows) -> list[tuple[str, int]]:
    """Of each file, its name and size in bytes: what is known of it without reading."""
    return [(file.name, file.stat().st_size) for path in rows.paths for file in _files(path)]


def _digest(what: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _digest([hash_file(file) for file in _files(Path(folder))])


@cache
def _code() -> str:
    """Of this package, which may come to read the same rows differently."""
    return _digest([hash_file(file) for file in sorted(Path(__file__).parent.glob("*.py"))])


def _files(path: Path) -> Sequence[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


@contextmanager
def _aside(directory: Path) -> Iterator[Path]:
    """A new folder in ``directory``, gone afterwards if it still has that name."""
    folder = directory / f".{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(entry: Path) -> None:
    """Out of the way at once, unless another process has done so."""
    with _aside(entry.parent) as folder, suppress(FileNotFoundError):
        os.rename(entry, folder / entry.name)
