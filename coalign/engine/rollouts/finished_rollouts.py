"""Keeps finished rollouts in the run folder, so that a resumed run does not generate them again.

``finished/VERSION.rollouts`` has the samples whose newest token was sampled by the weights of this version. It consists
of pieces: the samples that one process generated for one call. A piece is a line in the journal's format (a JSON object
with a checksum) and the bytes that it describes, which have their own checksum. The tokens of prompts and the rows of
data are not stored: they are drawn again. A response takes about 7 bytes a token.

Samples are reused only for the same prompts, options and settings, and only while the weights are the same: those of
the checkpoint, or of a step that was trained again with bitwise equal metrics. Damaged pieces are ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef, Meta, Store
from coalign.cluster.future import WorkerTask
from coalign.data.batch import Batch
from coalign.engine.rollouts.journal import decode_line, encode_line, format_groups, parse_groups
from coalign.engine.rollouts.pool import list_groups
from coalign.files import Sink, delete_path, describe_problem
from coalign.types import Stats

log = logging.getLogger(__name__)
FOLDER = "finished"
MAX_TOTAL_BYTES = 1024**3  # beyond it the oldest files are deleted
_ENDING = ".rollouts"
_COMPRESSED = 0.9  # a column is compressed if that leaves at most this share of its bytes


def _encode_samples(prompts: Batch, samples: Batch) -> tuple[list[dict[str, Any]], bytes] | None:
    """Return a description of each column of ``samples``, and their bytes one after the other.

    Tokens of prompts and columns of objects are left out, since ``prompts`` have them. None if the samples do not begin
    with their prompts.
    """
    source = _find_prompts(prompts, samples)
    if source is None or not {"prompt_length", "versions"}.issubset({*samples.token, *samples.sequence}):
        return None
    starts = samples["prompt_length"].long()
    if not torch.equal(starts, prompts.lengths[source]):
        return None
    is_response = torch.arange(samples.tokens_total) - samples.offsets[:-1][samples.segment] >= starts[samples.segment]
    if not torch.equal(samples["tokens"][~is_response], prompts.select(source)["tokens"].to(samples["tokens"].dtype)):
        return None
    tensors = [samples.lengths - starts]
    columns = [_describe("lengths", "lengths", tensors[0])]
    for name, column in samples.token.items():
        prefix = column[~is_response]
        if name != "tokens" and len(prefix) and not bool((prefix == prefix[0]).all()):
            return None
        fill = prefix[0].tolist() if name != "tokens" and len(prefix) else None
        columns.append({**_describe(name, "token", column), "prompt": fill})
        tensors.append(column[is_response])
    for name, values in samples.sequence.items():
        if isinstance(values, Tensor):
            columns.append(_describe(name, "sequence", values))
            tensors.append(values)
        elif not isinstance(given := prompts.get(name), list) or values != [given[row] for row in source.tolist()]:
            return None
    packed = [_pack(tensor, description) for tensor, description in zip(tensors, columns, strict=True)]
    return columns, b"".join(packed)


def _decode_samples(prompts: Batch, columns: Sequence[Mapping[str, Any]], content: bytes) -> Batch:
    """Return the samples of these prompts from the result of ``_encode_samples``."""
    tensors, start = dict[str, Tensor](), 0
    for column in columns:
        tensors[column["name"]] = _unpack(content[start : start + column["bytes"]], column)
        start += column["bytes"]
    levels = {column["name"]: column["kind"] for column in columns}
    token, sequence = (
        {name: tensor for name, tensor in tensors.items() if levels[name] == level} for level in ("token", "sequence")
    )
    responses = Batch(tensors["lengths"], token, sequence)
    responses = responses.select(torch.isin(responses["group"], prompts["group"]).nonzero().flatten())
    source = _find_prompts(prompts, responses)
    assert source is not None, "rows without a prompt are left out"
    source_prompts = prompts.select(source)
    is_response = torch.tensor([False, True]).repeat(len(source))
    is_response = is_response.repeat_interleave(torch.stack([source_prompts.lengths, responses.lengths], 1).flatten())
    full, fills = dict[str, Tensor](), {column["name"]: column.get("prompt") for column in columns}
    for name, values in responses.token.items():
        out = torch.empty((len(is_response), *values.shape[1:]), dtype=values.dtype)
        prefix = source_prompts["tokens"] if name == "tokens" else torch.tensor(fills[name])
        out[~is_response], out[is_response] = prefix.to(values.dtype), values
        full[name] = out
    objects = {name: values for name, values in source_prompts.sequence.items() if not isinstance(values, Tensor)}
    return Batch(source_prompts.lengths + responses.lengths, full, {**objects, **responses.sequence})


def _find_prompts(prompts: Batch, samples: Batch) -> Tensor | None:
    """Return i64[N]: the first row of each sample's prompt; None if one is missing."""
    first_rows = {number: row for row, number in reversed(list(enumerate(prompts["group"].tolist())))}
    rows = [first_rows.get(number, -1) for number in samples["group"].tolist()]
    return None if -1 in rows else torch.tensor(rows, dtype=torch.int64)


def _describe(name: str, level: str, column: Tensor) -> dict[str, Any]:
    return {"name": name, "kind": level, "dtype": str(column.dtype).removeprefix("torch."), "shape": column.shape[1:]}


def _pack(column: Tensor, description: dict[str, Any]) -> bytes:
    """Return the bytes of a column, and add to its description how they are packed."""
    width = column.element_size()
    raw = column.contiguous().view(torch.uint8).reshape(-1, width).numpy() if column.numel() else np.empty((0, width))
    if not column.is_floating_point() and width > 1:  # the high bytes of integers are mostly 0
        used = np.flatnonzero(raw.any(0))
        raw = raw[:, : int(used[-1]) + 1 if len(used) else 1]
    content = np.ascontiguousarray(raw, dtype=np.uint8).tobytes()
    packed = zlib.compress(content, 1)
    is_smaller = len(packed) <= _COMPRESSED * len(content)
    content = packed if is_smaller else content
    description |= {"width": raw.shape[1], "packed": is_smaller, "bytes": len(content)}
    return content


def _unpack(content: bytes, description: Mapping[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, description["dtype"])
    raw = np.frombuffer(zlib.decompress(content) if description["packed"] else content, dtype=np.uint8)
    low_bytes = raw.reshape(-1, description["width"])
    all_bytes = np.zeros((len(low_bytes), dtype.itemsize), dtype=np.uint8)
    all_bytes[:, : low_bytes.shape[1]] = low_bytes
    return torch.from_numpy(all_bytes).flatten().view(dtype).reshape(-1, *description["shape"])


@dataclass(frozen=True, slots=True)
class _Piece:
    """The position of a piece: its line begins at ``offset`` of the file of version ``file``."""

    file: int
    offset: int
    oldest: int  # the oldest version that sampled one of its tokens


class FinishedRollouts:
    """The finished rollouts of one run. ``run`` and ``settings`` identify it; files of another run are deleted.

    ``window``: (oldest, newest) versions of the tokens that may be used now. ``restored`` counts groups that were not
    generated again. A thread writes; a disk that is full or unreachable does not stop a run.
    """

    def __init__(self, folder: Path, store: Store, run: str, settings: str, step: int) -> None:
        """Read the existing files; the run goes on after ``step``."""
        self.folder = folder
        self.window = (step, step)
        self.restored = 0
        self._store = store
        self._identity = {"run": run, "settings": settings}
        self._pieces: dict[tuple[str, int], _Piece] = {}  # by options and group
        self._marks: dict[int, str | None] = {step: None}  # version -> hash of the metrics of the step that made it
        self._unconfirmed: dict[int, str | None] = {}  # the same, for versions that are to be trained again
        self._writer = ThreadPoolExecutor(1, "coalign-finished")
        self._sink = Sink(str(folder))
        for version in self._list_versions():
            self._read_file(version)
        if versions := sorted(version for version in self._unconfirmed if version >= step):
            log.info("finished rollouts of weight versions %s may be used again", format_groups(versions))

    # ---- of the loop -----------------------------------------------------------------------------------------------

    def confirm(self, step: int, stats: Stats) -> None:
        """Note the losses of the step that made version ``step``; drop rollouts that other weights have generated."""
        losses = sorted((name, float(metric.value).hex()) for name, metric in stats.items() if name.startswith("loss/"))
        self._marks[step] = hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:16]
        if step in self._unconfirmed and self._unconfirmed.pop(step) != self._marks[step]:
            log.warning("step %d has other metrics than before, so later rollouts are generated again", step)
            self._writer.submit(self._delete, [version for version in self._list_versions() if version >= step])
            self._pieces = {key: piece for key, piece in self._pieces.items() if piece.file < step}
            self._unconfirmed.clear()

    def go_back(self, step: int) -> None:
        """Note that the run goes on after ``step`` again: later versions have to be confirmed again."""
        self._unconfirmed |= {version: mark for version, mark in self._marks.items() if version > step}

    def forget_before(self, step: int) -> None:
        """Delete the rollouts that a run which goes on after ``step`` does not need."""
        self._pieces = {key: piece for key, piece in self._pieces.items() if piece.file >= step}
        self._writer.submit(self._delete, [version for version in self._list_versions() if version < step])

    def close(self, *, complete: bool) -> None:
        """Wait until everything is written; a ``complete`` run deletes it all."""
        self._writer.shutdown()
        if complete:
            delete_path(self.folder)

    def take_restored(self) -> int:
        """Return how many groups were restored since the last call."""
        restored, self.restored = self.restored, 0
        return restored

    # ---- of calls --------------------------------------------------------------------------------------------------

    def open_call(self, options: Mapping[str, Any]) -> _RecordedCall:
        """Return the record of a call of ``generate`` with these options."""
        digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:16]
        return _RecordedCall(self, digest, *self.window)

    def find(self, prompts: BatchRef, options: str, oldest: int, newest: int) -> tuple[Meta, Any] | None:
        """Return the description and the reference of the samples of these prompts; None unless all are there."""
        groups = list_groups(prompts.group)
        pieces = {group: self._pieces.get((options, group)) for group in groups}
        if not groups or not all(
            piece and oldest <= piece.oldest and piece.file <= newest for piece in pieces.values()
        ):
            return None
        batch = prompts.fetch()
        batches = []
        for piece in dict.fromkeys(pieces.values()):
            piece_groups = [group for group, candidate in pieces.items() if candidate == piece]
            samples = self._read_piece(piece, batch) if piece else None
            if samples is None:
                return None
            batches.append(samples.select(torch.isin(samples["group"], torch.tensor(piece_groups)).nonzero().flatten()))
        samples = Batch.concat(batches)
        positions = {group: number for number, group in enumerate(groups)}
        order = torch.tensor([positions[group] for group in samples["group"].tolist()]).argsort(stable=True)
        samples = samples.select(order)
        self.restored += len(groups)
        return Meta.of(samples), self._store.put(samples)

    def keep(self, prompts: BatchRef, options: str, task: WorkerTask) -> None:
        """Write the samples of these prompts once the task of ``generate`` has ended."""

        def submit(_: ThreadFuture[Meta]) -> None:
            with suppress(RuntimeError):  # the writer was closed meanwhile
                self._writer.submit(self._write, prompts, options, task)

        task.meta.add_done_callback(submit)

    # ---- files -----------------------------------------------------------------------------------------------------

    def _find_file(self, version: int) -> Path:
        return self.folder / f"{version}{_ENDING}"

    def _list_versions(self) -> list[int]:
        names = [path.name.removesuffix(_ENDING) for path in self.folder.glob(f"*{_ENDING}")]
        return sorted(int(name) for name in names if name.isdigit())

    def _delete(self, versions: Sequence[int]) -> None:
        with self._sink.survive():
            for version in versions:
                self._find_file(version).unlink(missing_ok=True)

    def _write(self, prompts: BatchRef, options: str, task: WorkerTask) -> None:
        if task.meta.exception() is not None or task.meta.result().failure is not None:
            return
        try:
            samples = BatchRef.of(task.meta.result(), task.payload, self._store).fetch()
            encoded = _encode_samples(prompts.fetch(), samples)
        except Exception as problem:  # the payload is lost, with its process
            log.debug("rollouts are not kept: %s", describe_problem(problem))
            return
        chosen = samples["versions"][samples["versions"] >= 0]
        if encoded is None or not len(chosen):
            return
        columns, content = encoded
        groups, file = list_groups(samples["group"]), int(chosen.max())
        oldest = int(chosen.min())
        record = {"options": options, "groups": format_groups(groups), "oldest": oldest, "columns": columns}
        line = encode_line({**record, "bytes": len(content), "sum": zlib.crc32(content)})
        with self._sink.survive():
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self._find_file(file), "ab") as out:
                if out.tell() == 0:
                    out.write(encode_line({**self._identity, "made": self._marks.get(file)}))
                offset = out.tell()
                out.write(line + content)
            self._pieces |= {(options, group): _Piece(file, offset, oldest) for group in groups}
            self._limit(file)

    def _limit(self, newest: int) -> None:
        sizes = {version: self._find_file(version).stat().st_size for version in self._list_versions()}
        while sum(sizes.values()) > MAX_TOTAL_BYTES and len(sizes) > 1 and (oldest := min(sizes)) != newest:
            self._delete([oldest])
            del sizes[oldest]

    def _read_file(self, version: int) -> None:
        """Register the intact pieces of a file. A file of another run is deleted."""
        path = self._find_file(version)
        with open(path, "rb") as file:
            head = decode_line(file.readline()) or {}
            if {name: head.get(name) for name in self._identity} != self._identity:
                log.warning("%s is of another run or of other settings, or damaged: it is deleted", path)
                path.unlink()
                return
            self._unconfirmed[version] = head.get("made")
            for offset, record in _read_pieces(file):
                if record is None:
                    log.warning("%s is damaged after %d bytes: what follows is generated again", path, offset)
                    os.truncate(path, offset)
                    return
                piece = _Piece(version, offset, record["oldest"])
                self._pieces |= {(record["options"], group): piece for group in parse_groups(record["groups"])}

    def _read_piece(self, piece: _Piece, prompts: Batch) -> Batch | None:
        """Return the samples of a piece; None if it is damaged, or of other prompts."""
        path = self._find_file(piece.file)
        try:
            with open(path, "rb") as file:
                file.seek(piece.offset)
                record = decode_line(file.readline())
                content = file.read(record["bytes"]) if record else b""
        except OSError as problem:
            log.warning("rollouts of %s are generated again: %s", path, describe_problem(problem))
            return None
        if record is None or zlib.crc32(content) != record["sum"]:
            log.warning("rollouts of %s are generated again: the checksum of some is wrong", path)
            return None
        return _decode_samples(prompts, record["columns"], content)


def _read_pieces(file: Any) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the offset and the line of each piece. A damaged or truncated one has None, and is the last."""
    size = os.fstat(file.fileno()).st_size
    while (offset := file.tell()) < size:
        record = decode_line(file.readline())
        if record is None or file.tell() + record["bytes"] > size:
            yield offset, None
            return
        file.seek(record["bytes"], os.SEEK_CUR)
        yield offset, record


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A call of ``generate`` whose samples are kept; those kept by an earlier run are not generated again."""

    rollouts: FinishedRollouts
    options: str
    oldest: int
    newest: int

    def find(self, rows: BatchRef) -> tuple[Meta, Any] | None:
        """Return the description and the reference of the samples of these prompts; None unless all are there."""
        return self.rollouts.find(rows, self.options, self.oldest, self.newest)

    def keep(self, rows: BatchRef, task: WorkerTask) -> None:
        """Keep what a task returns for these prompts."""
        self.rollouts.keep(rows, self.options, task)
