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
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.examples import Example, Examples
from coalign.data.phases import Phase
from coalign.data.scan import Scan, conclude, counted
from coalign.data.sources import Rows
from coalign.data.stored import Damaged, Stored, checksum, store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# What decides which rows are drawn when, not what a row becomes. The phase counts by its share.
WHICH = {"train", "eval", "mixing", "phases", "phase", "stream", "stream_window", "cache", "shuffle"}


class Cached:
    """A Source whose rows have been tokenised before. Draws exactly what `Scanned` would."""

    def __init__(self, examples: Examples, rows: Rows, phase: Phase | None, stored: Stored) -> None:
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


def open_cached(directory: Path, examples: Examples, rows: Rows, phase: Phase | None, identity: str) -> Cached:
    """The source as ``directory`` has it; tokenised and put there first if it has not, or if that was damaged.

    ``identity`` is that of `identify`. Processes may do this at once: the first entry to be complete is the one used.
    """
    contents = checksum(file for path in rows.paths for file in _files(path))
    entry = directory / f"{rows.paths[0].stem}-{_digest([identity, contents])}"
    if entry.exists():
        try:
            return Cached(examples, rows, phase, Stored(entry))
        except Damaged as error:
            log.warning("data.cache: %s; tokenising %s again", error, examples.name)
            _remove(entry)
    else:
        log.info("data.cache: %s has no %s of this content, tokenizer and keys; tokenising", directory, examples.name)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".building-", ignore_cleanup_errors=True) as aside:
        store(Path(aside), Scan(examples, rows, phase))
        _put(Path(aside), entry)
    return Cached(examples, rows, phase, Stored(entry))


def identify(
    examples: Examples, config: DataConfig, source: SourceConfig, phase: Phase | None, rows: Rows | None = None
) -> str:
    """A hash of all that decides what the rows of a file become, but their contents; with ``rows``, of the names and
    sizes of the files too."""
    return _digest(
        [
            _code(),
            type(examples).__qualname__,
            type(examples.template).__qualname__,
            examples.template.jinja,
            _tokenizer(examples.template.tokenizer),
            config.model_dump(exclude=WHICH),
            source.model_dump(exclude={"path", "weight"}),
            phase and phase.share,
            rows and [(file.name, file.stat().st_size) for path in rows.paths for file in _files(path)],
        ]
    )


def _digest(what: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True))


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return checksum(_files(Path(folder)))


@cache
def _code() -> str:
    return checksum(sorted(Path(__file__).parent.glob("*.py")))


def _files(path: Path) -> Iterable[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _put(folder: Path, entry: Path) -> None:
    """Give the complete ``folder`` its name, unless another process was first."""
    try:
        os.rename(folder, entry)
    except OSError:
        if not entry.exists():
            raise


def _remove(entry: Path) -> None:
    """Out of the way at once: another process may be putting a good one there."""
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".removing-") as aside:
        shutil.move(entry, aside)
