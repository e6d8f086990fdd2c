"""A conversion from start to end: planned and checked, written file by file to a temporary folder, renamed.

A journal in that folder has one line for each finished file, so that an interrupted conversion can be resumed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from coalign.files import require_free_output
from coalign.weights.sync.transport import WeightError
from coalign_megatron.convert.files import hash_file, hash_in_background, run_tasks, single_threaded
from coalign_megatron.convert.plan import (
    OPEN,
    Advance,
    ConversionOutput,
    HuggingFaceOutput,
    Record,
    TorchDistOutput,
    split_rows,
)
from coalign_megatron.convert.sources import ConversionRequest, OpenedCheckpoint, open_source
from coalign_megatron.layouts.shards import Box, Shard, ShardBox, TensorSpec, overlap, plan, reshard, slices


def compare_with_source(output: ConversionOutput, source: OpenedCheckpoint, folder: Path, advance: Advance) -> int:
    """Convert the output in ``folder`` back, and compare every element with the source's, bit for bit.

    If the output has another dtype, the source's elements are cast first. Returns the number of tensors compared.
    Raises WeightError naming the first that differs. All ranks of a legacy checkpoint are compared, so a difference
    between copies of the same weight is found too.
    """
    written = open_source(replace(output.request, source=folder, hf=None, pickles=False)).weights
    fetch = lru_cache(OPEN)(written.fetch)
    specs = {name: TensorSpec(spec.shape, written.dtypes[name]) for name, spec in output.specs.items()}
    held = [(rank, shard) for rank, shards in enumerate(source.weights.ranks) for shard in shards]
    for rank, shard in held:
        stored = source.weights.fetch(rank, shard.name)
        blocks = [(box, _clip(shard, box)) for box in _boxes(shard, stored.element_size())]
        moves = dict(plan([block for _, block in blocks], written.ranks))
        for (box, block), (_, tensor) in zip(blocks, reshard(specs, [p for _, p in blocks], moves, fetch), strict=True):
            expected = stored[slices(box)].to(tensor.dtype)
            for piece in block.pieces:
                index = slices(piece.local)
                if not _same(tensor[index], expected[index]):
                    raise WeightError(
                        f"'{piece.name}' {list(piece.full)} in {folder} differs from '{shard.name}' in "
                        f"{output.request.source}"
                    )
            advance(tensor.nbytes)
    return len(held)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _boxes(shard: Shard, itemsize: int) -> Iterator[Box]:
    """Split a shard into blocks along its first dimension of more than one row."""
    dim = next((i for i, size in enumerate(shard.shape) if size > 1), 0)
    for start, stop in split_rows(shard.shape[dim:], itemsize):
        yield tuple((start, stop) if i == dim else (0, size) for i, size in enumerate(shard.shape))


def _clip(shard: Shard, box: Box) -> Shard:
    """Return a box of a shard as a shard."""
    pieces = []
    for piece in shard.pieces:
        if (both := overlap(piece.local, box)) is not None:
            lead = len(piece.local) - len(piece.full)
            pairs = zip(both[lead:], piece.local[lead:], piece.full, strict=True)
            full = tuple((a - local[0] + there[0], b - local[0] + there[0]) for (a, b), local, there in pairs)
            local = tuple((a - start, b - start) for (a, b), (start, _) in zip(both, box, strict=True))
            pieces.append(ShardBox(piece.name, full, local))
    shape = tuple(stop - start for start, stop in box)
    return Shard(f"{shard.name}{list(box)}", shape, shard.like, tuple(pieces))


JOURNAL, MANIFEST = ".journal.jsonl", "coalign_convert.json"
TOOL = f"coalign {version('coalign')}"
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # title, total bytes -> a function that advances
# Compares the models of a source and of an output folder; returns the result in words.
Models = Callable[[ConversionRequest, OpenedCheckpoint, Path], str]


class ConversionJournal:
    """A line for the identity (request and source: only the same conversion can resume), and for each finished file."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.path, self.identity = folder / JOURNAL, identity

    def append(self, line: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the records of intact files by number. Raises ValueError for the journal of another conversion."""
        entries = []
        for line in self.path.read_bytes().splitlines() if self.path.is_file() else []:
            with suppress(ValueError):  # the last line may be incomplete
                entries.append(json.loads(line))
        if not entries or entries[0] != json.loads(json.dumps(self.identity)):
            changed = sorted(key for key in self.identity if not entries or entries[0].get(key) != self.identity[key])
            raise ValueError(
                f"{self.path.parent} was left by another conversion (different: {', '.join(changed)}): delete it"
            )
        records = {}
        for entry in entries[1:]:
            number, record = entry.pop("number"), entry
            file = self.path.parent / record["name"]
            if file.is_file() and hash_file(file) == {key: record[key] for key in ("size", "xxh3_128")}:
                records[number] = record
        return records


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of a conversion.

    ``reused``: files that an interrupted run had finished. ``verified``: the number of compared tensors (None: not
    verified). ``models``: the comparison of what the models compute, in words. ``left_out``: tensors not converted, as
    requested.
    """

    family: str
    source: str
    tensors: int
    bytes: int
    files: int
    reused: int
    verified: int | None
    models: str | None
    left_out: tuple[str, ...]


def convert(
    request: ConversionRequest,
    progress: Progress = lambda title, total: nullcontext(lambda n: None),
    models: Models = lambda request, source, folder: "no model was run",
) -> ConversionReport:
    """Convert a model as ``request`` says. ``models`` compares what both models compute, for ``request.verify``.

    The output appears complete or not at all. An interrupted conversion leaves its finished files in `OUTPUT.writing`,
    and ``request.resume`` continues from there. Raises ValueError for models that cannot be converted and requests that
    do not fit them, FileExistsError for an output that is not empty, OSError for a full disk, WeightError if verifying
    finds a difference.
    """
    output = request.output
    require_free_output(output, [request.source, *([request.hf] if request.hf else [])], is_folder=True)
    opened, plan = plan_conversion(request)
    aside = output.with_name(output.name + ".writing")
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_disk_space(aside, plan.total)
    journal = ConversionJournal(aside, _identify(request, opened))
    with single_threaded(), hash_in_background(opened.files) as hashes:
        records, reused = _write_files(request, plan, journal, progress)
        plan.finish(aside, records)
        compared = comparison = None
        if request.verify:
            with progress("comparing", plan.total) as advance:
                compared = compare_with_source(plan, opened, aside, advance)
            comparison = models(request, opened, aside)
        _check_source(request.source, opened.files, hashes())
        manifest = _make_manifest(aside, request, opened, plan, records, hashes(), compared, comparison)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    (aside / JOURNAL).unlink()
    if output.exists():
        output.rmdir()
    os.replace(aside, output)
    sizes = len(plan.sources), plan.total, len(records), reused
    left_out = tuple(opened.details.get("left_out", ()))
    return ConversionReport(opened.family.name, opened.format, *sizes, compared, comparison, left_out)


def _write_files(
    request: ConversionRequest, plan: ConversionOutput, journal: ConversionJournal, progress: Progress
) -> tuple[list[Record], int]:
    """Write the missing files. Returns the records of all files in order, and how many were there already."""
    folder, records = journal.path.parent, dict[int, Record]()
    if not folder.exists():
        folder.mkdir(parents=True)
        journal.append(journal.identity)
    elif not request.resume:
        raise FileExistsError(f"{folder} was left by an interrupted conversion: --resume continues, or delete it")
    else:
        records = journal.read()
    reused = len(records)
    left = [number for number in range(len(plan.names)) if number not in records]
    with progress("converting", plan.total) as advance:
        advance(sum(records[number]["size"] for number in records))
        try:
            write = partial(plan.write, folder=folder)
            for number, record in run_tasks(write, _make_writer, (request, folder), left, request.processes, advance):
                journal.append({"number": number, **record})
                records[number] = record
        except BaseException as problem:
            if not records:
                shutil.rmtree(folder)
            if not records or not isinstance(problem, OSError):
                raise
            raise OSError(
                problem.errno,
                f"{problem.strerror}: {len(records)} of {len(plan.names)} files are finished in {folder}; "
                "--resume continues, or delete it",
            ) from problem
    return [records[number] for number in range(len(plan.names))], reused


def plan_conversion(request: ConversionRequest) -> tuple[OpenedCheckpoint, ConversionOutput]:
    """Open the source and plan the output. Every request that cannot be fulfilled is refused here."""
    opened = open_source(request)
    if request.to == "hf" and opened.format == "hf" and request.dtype is None:
        raise ValueError(f"{request.source} is a Hugging Face directory already: --to megatron, or --dtype")
    return opened, (HuggingFaceOutput if request.to == "hf" else TorchDistOutput)(request, opened)


def _make_writer(request: ConversionRequest, folder: Path) -> Callable[..., Record]:
    return partial(plan_conversion(request)[1].write, folder=folder)


def _check_source(source: Path, files: list[Path], hashes: list[Record]) -> None:
    """Raise ValueError for a source file that differs from the manifest beside it."""
    if (source / MANIFEST).is_file():
        recorded = json.loads((source / MANIFEST).read_text())["files"]
        for file, record in zip(files, hashes, strict=True):
            name = str(file.relative_to(source))
            if recorded.get(name, record) != record:
                raise ValueError(f"{file} is {record}, but {MANIFEST} in its folder says {recorded[name]}")


def _check_disk_space(folder: Path, total: int) -> None:
    """Raise OSError if the disk cannot hold ``total`` bytes in ``folder``, which may have some of them already."""
    free = shutil.disk_usage(folder.parent).free
    needed = total - sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if free < needed:
        message = f"{folder.parent} has {free / 2**20:,.1f} MiB free, {needed / 2**20:,.1f} are needed"
        raise OSError(errno.ENOSPC, message)


def _identify(request: ConversionRequest, opened: OpenedCheckpoint) -> dict[str, Any]:
    """Return everything that determines the output files."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(request).items()}
    for key in ("processes", "resume", "verify"):
        del settings[key]
    stats = {file: file.stat() for file in opened.files}
    files = {str(file): [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}
    return {"tool": TOOL, **settings, "files": files}


def _make_manifest(
    folder: Path,
    request: ConversionRequest,
    opened: OpenedCheckpoint,
    plan: ConversionOutput,
    records: list[Record],
    hashes: list[Record],
    compared: int | None,
    models: str | None,
) -> dict[str, Any]:
    names = [str(file.relative_to(request.source)) for file in opened.files]
    written = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    hashed = {record["name"]: {key: record[key] for key in ("size", "xxh3_128")} for record in records}
    return {
        "tool": TOOL,
        "source": {
            "path": str(request.source.resolve()),
            "format": opened.format,
            **opened.details,
            "files": dict(zip(names, hashes, strict=True)),
        },
        "family": opened.family.name,
        "vocab_size": opened.config.vocab_size,
        "tensors": len(plan.sources),
        **plan.details,
        "verified": None if compared is None else f"{compared} tensors, bit for bit; {models}",
        "files": hashed | {name: hash_file(folder / name) for name in sorted(written - hashed.keys() - {JOURNAL})},
    }
