"""A conversion from beginning to end: planned and checked whole, written aside file by file, renamed.

What of an interrupted conversion is finished: one line a file, beside what it has written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coalign.weights.convert import verify
from coalign.weights.convert.files import hash_file, hash_in_background
from coalign.weights.convert.plan import Advance, ConversionOutput, HuggingFaceOutput, Record, TorchDistOutput
from coalign.weights.convert.request import ConversionRequest
from coalign.weights.convert.sources import OpenedCheckpoint, open_source
from coalign.weights.convert.workers import run, single_threaded

JOURNAL = ".journal.jsonl"


class ConversionJournal:
    """``what``: says which conversion it is, so that only the same one goes on."""

    def __init__(self, folder: Path, what: dict[str, Any]) -> None:
        self.path, self.what = folder / JOURNAL, what

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True)
        self._append(self.what)

    def add(self, number: int, record: dict[str, Any]) -> None:
        self._append({"number": number, **record})

    def _append(self, line: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finished(self) -> dict[int, dict[str, Any]]:
        """Records of files that are there as they were written. ValueError if they are of another conversion."""
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        entries = [line for line in map(_read, lines) if line is not None]
        if not entries or entries[0] != json.loads(json.dumps(self.what)):
            changed = sorted(key for key in self.what if not entries or entries[0].get(key) != self.what[key])
            raise ValueError(
                f"{self.path.parent} was left by another conversion (different: {', '.join(changed)}): delete it"
            )
        found = {}
        for entry in entries[1:]:
            number, record = entry.pop("number"), entry
            file = self.path.parent / record["name"]
            if file.is_file() and hash_file(file) == {key: record[key] for key in ("size", "xxh3_128")}:
                found[number] = record
        return found


def _read(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None  # the line that was being written


MANIFEST = "coalign_convert.json"
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # a title and a total → the function that advances
Models = Callable[
    [ConversionRequest, OpenedCheckpoint, Path], str
]  # of a source and what was written: what was found, in words


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """``reused``: files that an interrupted run had finished. ``verified``: tensors compared (None: not asked).
    ``models``: what was found of what they compute. ``left_out``: tensors that were asked not to be converted."""

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
    """Write ``request.output``. ``models``: how ``request.verify`` compares what the models compute.

    The output appears whole or not at all. What an interrupted conversion has finished stands in `OUTPUT.writing`, and
    ``request.resume`` goes on from there. Raises ValueError for models that cannot be converted and requests that do
    not fit them, FileExistsError for an output that holds something, OSError for a disk that is full, WeightError if
    verifying finds a difference, of tensors or of what the models compute.
    """
    output = request.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"--output: {output} exists and is not empty")
    opened, plan = plan_conversion(request)
    aside = output.with_name(output.name + ".writing")
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_room(output, plan.total - folder_size(aside))
    journal = ConversionJournal(aside, _what(request, opened))
    with single_threaded(), hash_in_background(opened.files) as hashes:
        records, reused = _written(request, plan, journal, progress)
        plan.finish(aside, records)
        compared = said = None
        if request.verify:
            with progress("comparing", plan.total) as advance:
                compared = verify.back(plan, opened, aside, advance)
            said = models(request, opened, aside)
        _check_source(request.source, opened.files, hashes())
        manifest = _manifest(aside, request, opened, plan, records, hashes(), compared, said)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    (aside / JOURNAL).unlink()
    if output.exists():
        output.rmdir()
    os.replace(aside, output)
    left_out = tuple(opened.details.get("left_out", ()))
    return ConversionReport(
        opened.family.name, opened.format, len(plan.sources), plan.total, len(records), reused, compared, said, left_out
    )


def _written(
    request: ConversionRequest, plan: ConversionOutput, journal: ConversionJournal, progress: Progress
) -> tuple[list[Record], int]:
    """Records of all files, in their order, and how many of them were there already."""
    records = _begun(request, journal)
    reused = len(records)
    left = [number for number in range(len(plan.names)) if number not in records]
    folder = journal.path.parent
    with progress("converting", plan.total) as advance:
        advance(sum(records[number]["size"] for number in records))
        try:
            mine = partial(plan.write, folder=folder)
            for number, record in run(mine, _writer, (request, folder), left, request.processes, advance):
                journal.add(number, record)
                records[number] = record
        except BaseException as problem:
            if not records:
                shutil.rmtree(folder)
            if not records or not isinstance(problem, OSError):
                raise
            raise OSError(
                problem.errno,
                f"{problem.strerror}: {len(records)} of {len(plan.names)} files are finished in {folder}; "
                "--resume goes on, or delete it",
            ) from problem
    return [records[number] for number in range(len(plan.names))], reused


def plan_conversion(request: ConversionRequest) -> tuple[OpenedCheckpoint, ConversionOutput]:
    """The source, and what will be written. Everything that can be refused is refused here."""
    opened = open_source(request)
    if request.to == "hf" and opened.format == "hf" and request.dtype is None:
        raise ValueError(f"{request.source} is a Hugging Face directory already: --to megatron, or --dtype")
    return opened, (HuggingFaceOutput if request.to == "hf" else TorchDistOutput)(request, opened)


def _writer(request: ConversionRequest, folder: Path) -> Callable[..., Record]:
    return partial(plan_conversion(request)[1].write, folder=folder)


def _check_source(source: Path, files: list[Path], found: list[Record]) -> None:
    """ValueError for a file that a manifest beside it tells something else of."""
    if (source / MANIFEST).is_file():
        told = json.loads((source / MANIFEST).read_text())["files"]
        for file, record in zip(files, found, strict=True):
            name = str(file.relative_to(source))
            if told.get(name, record) != record:
                raise ValueError(f"{file} is not what {MANIFEST} there tells of: {record}, not {told[name]}")


def _begun(request: ConversionRequest, journal: ConversionJournal) -> dict[int, Record]:
    """Files that are finished already."""
    folder = journal.path.parent
    if not folder.exists():
        journal.begin()
        return {}
    if not request.resume:
        raise FileExistsError(f"{folder} was left by an interrupted conversion: --resume goes on, or delete it")
    return journal.finished()


def _check_room(output: Path, needed: int) -> None:
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{output.parent} has {free / 2**20:,.1f} MiB free, {needed / 2**20:,.1f} are needed"
        )


def folder_size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _what(request: ConversionRequest, opened: OpenedCheckpoint) -> dict[str, Any]:
    """What a conversion is: the same words mean the same files."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(request).items()}
    for key in ("processes", "resume", "verify"):
        del settings[key]
    stats = {file: file.stat() for file in opened.files}
    files = {str(file): [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}
    return {"tool": _tool(), **settings, "files": files}


def _names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def _tool() -> str:
    return f"coalign {version('coalign')}"


def _manifest(
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
    known = {record["name"]: {key: record[key] for key in ("size", "xxh3_128")} for record in records}
    return {
        "tool": _tool(),
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
        "files": known | {name: hash_file(folder / name) for name in sorted(_names(folder) - known.keys() - {JOURNAL})},
    }
