"""Builds an indexed dataset from files of documents, in several processes, and resumes a build that was killed.

Rows are divided into chunks of equal number. Each chunk is written atomically as an indexed dataset in PREFIX.parts. At
the end all chunks are joined in file order, so the result does not depend on the processes.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.cache import hash_file_samples, hash_settings
from coalign.data.kinds import DocumentEncoder
from coalign.data.sources import START, ReadPosition, open_rows
from coalign.data.templates import load_template
from coalign.files import move_aside, require_free_output, write_text_atomically
from coalign.hub_data import describe_source
from coalign_megatron.indexed import IndexedTokens, name_files
from coalign_megatron.indexed_writer import IndexedWriter, choose_dtype

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Inputs and settings of a build. ``chunk`` is the number of rows per task; the others are those of `data`."""

    inputs: tuple[str, ...]
    tokenizer: str
    text_key: str = "text"
    on_empty: Literal["drop", "error"] = "drop"
    bad_rows: Literal["drop", "error"] = "error"
    keep_special_tokens: bool = False
    trust_remote_code: bool = False
    chunk: int = 10_000

    @property
    def config(self) -> DataConfig:
        return DataConfig(text_key=self.text_key, on_empty=self.on_empty, bad_rows=self.bad_rows)

    def source(self, which: int) -> SourceConfig:
        return SourceConfig(path=self.inputs[which], keep_special_tokens=self.keep_special_tokens)


@dataclass(frozen=True, slots=True)
class BuildTask:
    """One chunk: rows of input number ``input`` from ``position`` on, to write as ``prefix``."""

    plan: BuildPlan
    input: int
    position: ReadPosition
    prefix: Path


def build(
    plan: BuildPlan,
    prefix: Path,
    *,
    processes: int,
    advance: Callable[[int], None] = lambda rows: None,
    overwrite: bool = False,
) -> Counter:
    """Write PREFIX.bin and PREFIX.idx, and return counts: `rows`, `used`, `empty`, …, and `tokens`.

    ``advance`` is called with the number of rows done. FileExistsError if the output exists, unless ``overwrite`` says
    that it may be replaced. ValueError for an output that is an input, for a row that may not be dropped
    (data.bad_rows, data.on_empty), for PREFIX.parts of another build, and if no document is usable.
    """
    _require_free(prefix, plan.inputs, overwrite)
    folder = prefix.with_name(f"{prefix.name}.parts")
    _claim(folder, plan)
    total: Counter[str] = Counter()
    done: list[Path] = []
    # A single worker is a thread, because a new process needs seconds for its imports.
    single = processes == 1
    with ThreadPoolExecutor(1) if single else ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for task, counts in _run_tasks(pool, _tasks(plan, folder), limit=2 * processes):
            done.append(task.prefix)
            total += counts
            advance(counts["rows"])
    if not total["used"]:
        shutil.rmtree(folder)
        raise ValueError(f"{', '.join(plan.inputs)}: no document to write ({dict(total)})")
    join([IndexedTokens(chunk) for chunk in sorted(done)], prefix, overwrite=overwrite)
    shutil.rmtree(folder)
    return total


def join(datasets: Sequence[IndexedTokens], prefix: Path, *, overwrite: bool = False) -> None:
    """Write all documents of ``datasets``, in order, as one dataset.

    ValueError if the types of their tokens differ, or if one of them is the output. FileExistsError if the output
    exists, unless ``overwrite`` says that it may be replaced.
    """
    _require_free(prefix, [file for dataset in datasets for file in name_files(dataset.prefix)], overwrite)
    for file in name_files(prefix):
        file.unlink(missing_ok=True)  # a link would have its target overwritten
    with IndexedWriter(prefix, datasets[0].dtype) as out:
        for dataset in datasets:
            out.extend(dataset)


def _require_free(prefix: Path, inputs: Iterable[str | Path], overwrite: bool) -> None:
    for file in name_files(prefix):
        require_free_output(file, inputs, overwrite=overwrite)


def _run_tasks(pool: Executor, tasks: Iterator[BuildTask], limit: int) -> Iterator[tuple[BuildTask, Counter]]:
    """Run the tasks and yield each with its counts as it ends; at most ``limit`` are submitted at once."""
    running: dict[Future[Counter], BuildTask] = {}
    while True:
        for task in islice(tasks, limit - len(running)):
            running[pool.submit(_tokenise, task)] = task
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            task = running.pop(future)
            try:
                counts = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            yield task, counts


def _tasks(plan: BuildPlan, folder: Path) -> Iterator[BuildTask]:
    number = 0
    for which, path in enumerate(plan.inputs):
        for position in islice(_positions(path), 0, None, plan.chunk):
            yield BuildTask(plan, which, position, folder / f"{number:08d}")
            number += 1


def _positions(path: str) -> Iterator[ReadPosition]:
    """Yield the position of each row."""
    position = START
    for _, after in open_rows(path).read():
        yield position
        position = after


def _tokenise(task: BuildTask) -> Counter[str]:
    """Write the chunk, unless an earlier build has done so; return its counts."""
    counts = task.prefix.with_suffix(".json")
    if counts.exists():
        return Counter(json.loads(counts.read_bytes()))
    encoder, dtype = _open_reader(task.plan, task.input)
    encoder.counts = Counter()
    with IndexedWriter(task.prefix, dtype) as out:
        for entry, _ in islice(open_rows(task.plan.inputs[task.input]).read(task.position), task.plan.chunk):
            for example in encoder.use(entry) or ():
                out.add(example.tokens)
                encoder.counts["tokens"] += len(example.tokens)
    write_text_atomically(counts, json.dumps(dict(encoder.counts)))
    return encoder.counts


@cache
def _open_reader(plan: BuildPlan, which: int) -> tuple[DocumentEncoder, Any]:
    """Make the encoder of an input and the type of its tokens, once per process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan.tokenizer, trust_remote_code=plan.trust_remote_code)
    template = load_template(tokenizer, "none", keep_special_tokens=plan.keep_special_tokens)
    encoder = DocumentEncoder(describe_source(plan.inputs[which]), plan.config, plan.source(which), template)
    return encoder, choose_dtype(len(tokenizer))


def _claim(folder: Path, plan: BuildPlan) -> None:
    """Create the folder of the chunks. ValueError if it holds those of another build."""
    told = folder / "build.json"
    now = _identity(plan)
    if told.exists() and any(folder.glob("[0-9]*.json")):
        if differing := [key for key, value in json.loads(told.read_bytes()).items() if now.get(key) != value]:
            raise ValueError(
                f"{folder} holds parts of a build with other {', '.join(differing)}; remove it to begin anew"
            )
        return
    if folder.exists() and not told.exists() and any(folder.iterdir()):
        log.warning("%s holds files that no build wrote; it is now %s", folder, move_aside(folder))
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(told, json.dumps(now))


def _identity(plan: BuildPlan) -> Mapping[str, Any]:
    identity = {"settings": [], "inputs": []}
    for which, path in enumerate(plan.inputs):
        examples, dtype = _open_reader(plan, which)
        identity["settings"].append(hash_settings(examples, plan.config, plan.source(which), None, None))
        identity["inputs"].append([path, hash_file_samples(open_rows(path))])
    return json.loads(json.dumps({**identity, "dtype": str(dtype), "chunk": plan.chunk}))
