"""Tokenised sources on disk: going through a source costs minutes, mapping what came of it nothing.

An entry is found by its contents (the bytes of the files, the tokenizer, the template, the kind of rows, the keys that
say how rows are read, and this package's code), so it can never be out of date, only absent.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.examples import Example, Examples
from coalign.data.phases import Phase
from coalign.data.scan import Scan, conclude, counted
from coalign.data.sources import FileRows
from coalign.data.stored import Damaged, StoredExamples, checksum, store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# What decides which rows are drawn when, not what a row becomes. The phase counts by its share.
WHICH = {"train", "eval", "mixing", "phases", "phase", "stream", "stream_window", "cache", "shuffle"}


class Cached:
    """A Source whose rows have been tokenised before. Draws exactly what `Scanned` would."""

    def __init__(self, examples: Examples, rows: FileRows, phase: Phase | None, stored: StoredExamples) -> None:
        """ValueError if it holds no usable row."""
        examples.counts = Counter(stored.meta["counts"])
        self.name, self.tokens = examples.name, stored.meta["tokens"]
        self._examples, self._rows, self._phase, self._stored = examples, rows, phase, stored
        conclude(self, examples)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._stored.number(index)
        row = self._examples.reader.named(self._rows[number])
        return self._examples.marked(self._stored.read(index, row), number)

    def report(self) -> str:
        return f"{counted(self._examples, self._phase, len(self._rows))}: {self._examples.report()}"

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "rows": len(self), "hash": self._stored.meta["hash"]}


def open_cached(directory: Path, examples: Examples, rows: FileRows, phase: Phase | None, identity: str) -> Cached:
    """The source as ``directory`` has it; tokenised and put there first if it has not, or if that was damaged.

    ``identity`` is `identify` with the `contents`. Processes may do this at once: the first entry to be complete is
    used.
    """
    entry = directory / f"{rows.paths[0].stem}-{_digest([identity, _code()])}"
    if entry.exists():
        try:
            return Cached(examples, rows, phase, StoredExamples(entry))
        except Damaged as error:
            log.warning("data.cache: %s; tokenising %s again", error, examples.name)
            _remove(entry)
    else:
        log.info("data.cache: %s has no %s of this content, tokenizer and keys; tokenising", directory, examples.name)
    with _aside(directory) as folder:
        store(folder, Scan(examples, rows, phase))
        try:
            os.rename(folder, entry)
        except OSError:
            if not entry.exists():  # else another process was first
                raise
    return Cached(examples, rows, phase, StoredExamples(entry))


def identify(examples: Examples, config: DataConfig, source: SourceConfig, phase: Phase | None, files: Any) -> str:
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


def contents(rows: FileRows) -> list[str]:
    """Of each file, a hash of its bytes."""
    return [checksum(file) for path in rows.paths for file in _files(path)]


def sizes(rows: FileRows) -> list[tuple[str, int]]:
    """Of each file, its name and size in bytes: what is known of it without reading."""
    return [(file.name, file.stat().st_size) for path in rows.paths for file in _files(path)]


def _digest(what: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _digest([checksum(file) for file in _files(Path(folder))])


@cache
def _code() -> str:
    """Of this package, which may come to read the same rows differently."""
    return _digest([checksum(file) for file in sorted(Path(__file__).parent.glob("*.py"))])


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
