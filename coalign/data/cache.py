"""Tokenised sources on disk: reading and tokenising a source takes minutes, mapping the result takes none.

An entry is found by a hash of everything that it depends on: the bytes of the files, the tokenizer, the template, the
kind of rows, the settings of `data` and this package's code. So it can be absent, but never out of date.

An entry is a folder of arrays of fixed width, which are mapped:

    rows        i64 [rows, 2]        number in the source file, first sequence
    sequences   i64 [sequences, 2]   end in `tokens`, end in `rest`
    tokens      i32
    loss_mask   u8, empty for prompts
    rest        JSON of each sequence: its columns and images, and what its row has beyond the source's row
    meta.json   counts, hash and number of tokens; a checksum of each other file

The rows themselves stay in the source's files.
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from coalign.config.introspect import list_marked
from coalign.config.schema import DataConfig, DrawSetting, SourceConfig
from coalign.data.examples import MARKS, Example, RowEncoder
from coalign.data.order import FileSource, SourceScan
from coalign.data.shuffle import DataPhase
from coalign.data.sources import FileRows
from coalign.files import WatchedFiles, describe_problem, hash_file, hash_samples, list_files
from coalign.types import SOURCE_KEY, ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ARRAYS = {"rows": np.int64, "sequences": np.int64, "tokens": np.int32, "loss_mask": np.bool_, "rest": np.uint8}
HASH = xxhash.xxh3_128


class _DamagedCache(ValueError):
    """A cache entry whose files were changed after they were written."""


class _ExampleStore:
    """The examples that `_store_examples` wrote to ``folder``, by the number of a usable row."""

    def __init__(self, folder: Path) -> None:
        """_DamagedCache if a file is missing or has changed."""
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
            changed = [name for name in ARRAYS if hash_file(folder / name, HASH) != self.meta["checksums"][name]]
            if [type(self.meta[name]) for name in ("counts", "hash", "tokens")] != [dict, str, int]:
                raise ValueError("meta.json has counts, hash or tokens of another kind")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _DamagedCache(f"{folder} cannot be read: {describe_problem(error)}") from error
        if changed:
            raise _DamagedCache(f"{folder}: {', '.join(changed)} is not what was written")
        arrays = {  # empty files cannot be mapped
            name: np.memmap(file, dtype, mode="r") if (file := folder / name).stat().st_size else np.zeros(0, dtype)
            for name, dtype in ARRAYS.items()
        }
        self._rows, self._sequences = arrays["rows"].reshape(-1, 2), arrays["sequences"].reshape(-1, 2)
        self._tokens, self._mask, self._rest = arrays["tokens"], arrays["loss_mask"], arrays["rest"]
        self._watched = WatchedFiles(folder / name for name in ARRAYS)

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        """The number in the source file of usable row ``index``."""
        return int(self._rows[index, 0])

    def read(self, index: int, row: Mapping[str, Any]) -> list[Example]:
        """Read the examples of usable row ``index``; ``row`` is the source's, with the reader's names."""
        self._watched.check()
        first = int(self._rows[index, 1])
        last = int(self._rows[index + 1, 1]) if index + 1 < len(self) else len(self._sequences)
        return [self._example(i, row) for i in range(first, last)]

    def _example(self, i: int, row: Mapping[str, Any]) -> Example:
        token, text = self._sequences[i - 1].tolist() if i else (0, 0)
        token_end, text_end = self._sequences[i].tolist()
        rest = json.loads(self._rest[text:text_end].tobytes())
        mask = self._mask[token:token_end].tolist() if len(self._mask) else None
        spans = [ImageSpan(**span | {"grid": tuple(span["grid"])}) for span in rest.get("images", ())]
        images = tuple(spans) if "images" in rest else None
        return Example(self._tokens[token:token_end].tolist(), {**row, **rest["row"]}, mask, rest["columns"], images)


def _store_examples(folder: Path, scan: SourceScan) -> None:
    """Write everything that ``scan`` yields to the empty ``folder``, row by row.

    ValueError for a row that got a value which JSON cannot represent.
    """
    sequences = tokens = text = 0
    with ExitStack() as stack:
        out = {name: stack.enter_context((folder / name).open("wb")) for name in ARRAYS}
        for number, examples in scan:
            array("q", [number, sequences]).tofile(out["rows"])
            row = scan.encoder.reader.add_names(scan.rows[number])
            try:
                rests = [_encode_rest(example, row) for example in examples]
            except TypeError as error:
                raise ValueError(f"{scan.rows.where(number)}: data.cache cannot keep this row: {error}") from error
            for example, rest in zip(examples, rests, strict=True):
                sequences, tokens, text = sequences + 1, tokens + len(example.tokens), text + len(rest)
                array("q", [tokens, text]).tofile(out["sequences"])
                array("i", example.tokens).tofile(out["tokens"])
                out["loss_mask"].write(bytes(example.loss_mask or []))
                out["rest"].write(rest)
    meta = {
        "counts": dict(scan.encoder.counts),
        "hash": scan.hash,
        "tokens": scan.tokens,
        "checksums": {name: hash_file(folder / name, HASH) for name in ARRAYS},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _encode_rest(example: Example, row: Mapping[str, Any]) -> bytes:
    marks = (*MARKS, SOURCE_KEY)  # `mark_origin` adds them again
    added = {k: v for k, v in example.row.items() if k not in marks and (k not in row or row[k] != v)}
    rest: dict[str, Any] = {"row": added, "columns": example.columns}
    if example.images is not None:
        rest["images"] = [asdict(span) for span in example.images]
    return json.dumps(rest).encode()


class _CachedSource(FileSource):
    """A source for ShuffledOrder whose rows were tokenised before. It draws exactly what ScannedSource would."""

    def __init__(self, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None, store: _ExampleStore) -> None:
        """ValueError if it holds no usable row."""
        encoder.counts, self._store = Counter(store.meta["counts"]), store
        super().__init__(encoder, rows, phase, store.meta["tokens"], store.meta["hash"])

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> list[Example]:
        number = self._store.number(index)
        row = self._encoder.reader.add_names(self._rows[number])
        return self._encoder.mark_origin(self._store.read(index, row), number)


def open_cached(
    directory: Path, encoder: RowEncoder, rows: FileRows, phase: DataPhase | None, identity: str
) -> _CachedSource:
    """Open the source's entry in ``directory``; tokenise the source first if there is none, or a damaged one.

    ``identity`` is `hash_settings` of the `hash_files`. Several processes may do this at once: the first complete entry
    is used.
    """
    entry = directory / f"{rows.paths[0].stem}-{_digest([identity, _hash_code()])}"
    if entry.exists():
        try:
            return _CachedSource(encoder, rows, phase, _ExampleStore(entry))
        except _DamagedCache as error:
            log.warning("data.cache: %s; tokenising %s again", error, encoder.name)
            with _temporary_folder(directory) as folder, suppress(FileNotFoundError):  # another process may be faster
                os.rename(entry, folder / entry.name)
    else:
        log.info("data.cache: %s has no %s of this content, tokenizer and keys; tokenising", directory, encoder.name)
    with _temporary_folder(directory) as folder:
        _store_examples(folder, SourceScan(encoder, rows, phase))
        try:
            os.rename(folder, entry)
        except OSError:
            if not entry.exists():  # otherwise another process was first
                raise
    return _CachedSource(encoder, rows, phase, _ExampleStore(entry))


def hash_settings(
    encoder: RowEncoder, config: DataConfig, source: SourceConfig, phase: DataPhase | None, files: Any
) -> str:
    """Hash everything that the encoding of a source's rows depends on; ``files`` describes their contents."""
    placeholders = encoder.template.placeholders
    images = [] if placeholders is None else [placeholders.processor.identity, str(placeholders.files.root)]
    return _digest(
        [
            *images,
            type(encoder).__qualname__,
            type(encoder.template).__qualname__,
            encoder.template.jinja,
            _hash_tokenizer(encoder.template.tokenizer),
            config.model_dump(exclude=list_marked(DataConfig, DrawSetting), exclude_defaults=True),
            source.model_dump(exclude=list_marked(SourceConfig, DrawSetting), exclude_defaults=True),
            phase.share if phase else None,
            files,
        ]
    )


def hash_files(rows: FileRows) -> list[str]:
    """Hash the bytes of each file; a file on the hub is identified by its commit."""
    return [hash_file(path, HASH) if isinstance(path, Path) else str(path) for path in rows.paths]


def hash_file_samples(rows: FileRows) -> list[tuple[str, str]]:
    """Return the name of each file and a hash of its samples: up to 1 GiB is read completely, else some 128 MiB."""
    blocks = max(2, 1024 // len(rows.paths))
    return [(path.name, hash_samples(path, blocks) if isinstance(path, Path) else str(path)) for path in rows.paths]


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _digest([hash_file(file, HASH) for file in list_files(Path(folder))])


@cache
def _hash_code() -> str:
    """Hash this package's code, because a new version may read the same rows differently."""
    return _digest([hash_file(file, HASH) for file in sorted(Path(__file__).parent.rglob("*.py"))])


@contextmanager
def _temporary_folder(directory: Path) -> Iterator[Path]:
    """Make a folder in ``directory``, and remove it afterwards unless it was renamed."""
    folder = directory / f".{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
