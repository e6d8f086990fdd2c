"""From files of documents to an indexed dataset: by several processes, and going on where a killed one stopped.

The rows are cut into chunks of equal number. Each becomes an indexed dataset of its own in PREFIX.parts, whole or not
at all; at the end they are joined in the order of the files, so the result does not depend on the processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.cache import hash_settings, list_file_sizes
from coalign.data.indexed.format import IndexedTokens, IndexedWriter, choose_dtype, name_files
from coalign.data.kinds import DocumentEncoder
from coalign.data.sources import START, ReadPosition, open_rows
from coalign.data.templates import load_template
from coalign.files import move_aside

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What becomes of what; ``chunk``: rows that one process works on at a time. The others: DataConfig's."""

    inputs: tuple[str, ...]
    tokenizer: str
    text_key: str = "text"
    on_empty: Literal["drop", "error"] = "drop"
    on_missing_key: Literal["drop", "error"] = "error"
    trust_remote_code: bool = False
    chunk: int = 10_000

    @property
    def config(self) -> DataConfig:
        return DataConfig(text_key=self.text_key, on_empty=self.on_empty, on_missing_key=self.on_missing_key)


@dataclass(frozen=True, slots=True)
class BuildTask:
    """One chunk: rows of an input from a place on. ``part`` is the prefix to write."""

    plan: BuildPlan
    input: int
    place: ReadPosition
    part: Path


def build(
    plan: BuildPlan, prefix: Path, *, processes: int, advance: Callable[[int], None] = lambda rows: None
) -> Counter:
    """Write PREFIX.bin and PREFIX.idx; how many rows there were, and what became of them (`used`, `empty`, …, and
    `tokens`). ``advance`` is told of rows that are done.

    Raises FileExistsError if the output is there, ValueError for a row that may not be dropped (data.on_missing_key,
    data.on_empty), for PREFIX.parts of other inputs or settings, and if no document is left.
    """
    _check_absent(prefix)
    parts = prefix.with_name(f"{prefix.name}.parts")
    _claim(parts, plan)
    total: Counter[str] = Counter()
    done: list[Path] = []
    with _workers(processes) as pool:
        for task, counts in _each(pool, _tasks(plan, parts), ahead=2 * processes):
            done.append(task.part)
            total += counts
            advance(counts["rows"])
    if not total["used"]:
        shutil.rmtree(parts)
        raise ValueError(f"{', '.join(plan.inputs)}: no document to write ({dict(total)})")
    join([IndexedTokens(part) for part in sorted(done)], prefix)
    shutil.rmtree(parts)
    return total


def join(datasets: Sequence[IndexedTokens], prefix: Path) -> None:
    """All documents of ``datasets``, in turn, as one dataset. ValueError unless their tokens are of one type,
    FileExistsError if it is there."""
    _check_absent(prefix)
    with IndexedWriter(prefix, datasets[0].dtype) as out:
        for each in datasets:
            out.extend(each)


def _check_absent(prefix: Path) -> None:
    if there := [file for file in name_files(prefix) if file.exists()]:
        raise FileExistsError(f"{there[0]} exists already; remove it or choose another output")


def _workers(processes: int) -> Executor:
    """One is this process: it has what it needs, and a new one takes seconds to import it."""
    return ThreadPoolExecutor(1) if processes == 1 else ProcessPoolExecutor(processes, get_context("spawn"))


def _each(pool: Executor, tasks: Iterator[BuildTask], ahead: int) -> Iterator[tuple[BuildTask, Counter]]:
    """Each task and what came of it, as they end; never more than ``ahead`` of them wait."""
    running: dict[Future[Counter], BuildTask] = {}
    while True:
        for task in islice(tasks, ahead - len(running)):
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


def _tasks(plan: BuildPlan, parts: Path) -> Iterator[BuildTask]:
    number = 0
    for which, path in enumerate(plan.inputs):
        for place in islice(_places(path), 0, None, plan.chunk):
            yield BuildTask(plan, which, place, parts / f"{number:08d}")
            number += 1


def _places(path: str) -> Iterator[ReadPosition]:
    """Where each row begins."""
    place = START
    for _, after in open_rows(path).read():
        yield place
        place = after


def _tokenise(task: BuildTask) -> Counter[str]:
    """Write the part, unless an earlier build has."""
    told = task.part.with_suffix(".json")
    if told.exists():
        return Counter(json.loads(told.read_bytes()))
    examples, dtype = _reading(task.plan, task.input)
    examples.counts = Counter()
    with IndexedWriter(task.part, dtype) as out:
        for entry, _ in islice(open_rows(task.plan.inputs[task.input]).read(task.place), task.plan.chunk):
            for example in examples.use(entry) or ():
                out.add(example.tokens)
                examples.counts["tokens"] += len(example.tokens)
    _write(told, dict(examples.counts))
    return examples.counts


@cache
def _reading(plan: BuildPlan, which: int) -> tuple[DocumentEncoder, Any]:
    """How documents of an input are made, and the type of their tokens. Once in a process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan.tokenizer, trust_remote_code=plan.trust_remote_code)
    path = plan.inputs[which]
    examples = DocumentEncoder(Path(path).name, plan.config, SourceConfig(path=path), load_template(tokenizer, "none"))
    return examples, choose_dtype(len(tokenizer))


def _claim(parts: Path, plan: BuildPlan) -> None:
    """Make the folder of the parts. ValueError if it holds those of another build."""
    told = parts / "build.json"
    now = _identity(plan)
    if told.exists() and any(parts.glob("[0-9]*.json")):
        if differing := [key for key, value in json.loads(told.read_bytes()).items() if now.get(key) != value]:
            raise ValueError(
                f"{parts} holds parts of a build with other {', '.join(differing)}; remove it to begin anew"
            )
        return
    if parts.exists() and not told.exists() and any(parts.iterdir()):
        log.warning("%s holds files that no build wrote; it is now %s", parts, move_aside(parts))
    parts.mkdir(parents=True, exist_ok=True)
    _write(told, now)


def _identity(plan: BuildPlan) -> Mapping[str, Any]:
    found = {"settings": [], "inputs": []}
    for which, path in enumerate(plan.inputs):
        examples, dtype = _reading(plan, which)
        found["settings"].append(hash_settings(examples, plan.config, SourceConfig(path=path), None, None))
        found["inputs"].append([path, list_file_sizes(open_rows(path))])
    return json.loads(json.dumps({**found, "dtype": str(dtype), "chunk": plan.chunk}))


def _write(path: Path, what: Any) -> None:
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps(what))
    os.replace(aside, path)
