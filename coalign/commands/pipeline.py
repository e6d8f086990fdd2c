"""`coalign pipeline`: stages in order, round after round; what is done is not done again.

``<output>/round_K/NN_NAME/`` holds a stage's output and ``stage.json``: what it depends on (settings, and the contents
of every file and model that they name), whether it is done, its counts and seconds. A stage that depends on something
else than when it was done is done anew, and so is whatever depends on its output. The old folder is moved aside, never
deleted.

What a result depends on, as text that can be compared: contents of files, whatever their names and times.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

import torch

from coalign.commands.stages import KINDS, trains_a_policy
from coalign.config.errors import Key, format_key
from coalign.config.introspect import find_input, is_result_relevant
from coalign.config.pipelines import PipelineFile
from coalign.config.schema import Section
from coalign.engine.hooks.run_folder import lock
from coalign.files import move_aside
from coalign.launch.build import recipe
from coalign.report.display import Display
from coalign.report.step_line import number


def fingerprint_settings(settings: Section) -> dict[str, Any]:
    """Of every setting that changes results, by its dotted key: its value; of a path the contents of what lies there,
    and of a function of one's own its source, too."""
    found: dict[str, Any] = {}
    for key, value in _leaves(settings.model_dump(mode="json"), ()):
        if not is_result_relevant(key, type(settings)):
            continue
        is_input = value is not None and find_input(key, type(settings)) is not None
        found[format_key(key)] = fingerprint_path(value) if is_input else value
        if isinstance(value, str) and ":" in value and key[-1] in ("fn", "algorithm", "module"):
            found[f"{format_key(key)} (source)"] = fingerprint_code(value)
    return found


def fingerprint_path(path: str | Path) -> str:
    """Of the contents of a file, of the files that a pattern fits, or of all files in a directory with their names
    (hidden ones aside)."""
    path = Path(path)
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        return _of_all((found, _of_file(Path(found))) for found in sorted(glob(str(path), recursive=True)))
    files = sorted(p for p in path.rglob("*") if p.is_file())
    names = [file.relative_to(path) for file in files]
    return _of_all(
        (str(name), _of_file(path / name)) for name in names if not any(part.startswith(".") for part in name.parts)
    )


def fingerprint_code(name: str) -> str:
    """Of the source file of a function or class by its dotted path (``my.pkg:fn``); what that imports is not seen."""
    spec = importlib.util.find_spec(name.partition(":")[0])
    return _of_file(Path(spec.origin)) if spec and spec.origin else ""


def _leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield key, value
    for name, item in items:
        yield from _leaves(item, (*key, name))


def _of_all(parts: Iterable[tuple[str, str]]) -> str:
    found = hashlib.sha256()
    for name, digest in parts:
        found.update(f"{name}\0{digest}\0".encode())
    return found.hexdigest()[:32]


def _of_file(path: Path) -> str:
    stat = path.stat()
    return _digest(path.resolve(), stat.st_size, stat.st_mtime_ns)


@cache  # a pipeline asks for the same model again and again
def _digest(path: Path, size: int, changed: int) -> str:
    with open(path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()[:32]


Record = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A stage of one round, with its settings in it."""

    round: int
    name: str
    kind: str
    folder: Path
    settings: Section

    @property
    def output(self) -> Path:
        return self.folder / KINDS[self.kind].output

    def __str__(self) -> str:
        return f"round {self.round} {self.name}"


def plan(file: PipelineFile) -> list[Stage]:
    """Every stage of every round, its settings validated. Raises ConfigError with every problem of a stage."""
    header, stages, made = file.header, [], set()
    model = header.model
    for round in range(1, header.rounds + 1):
        outputs: Record = {}
        for index, given in enumerate(header.stages):
            names = {"output": header.output, "round": round, "model": model, "stages": outputs}
            settings = file.settings(index, names, made, lambda algorithm: recipe(algorithm).defaults)
            with file.located(index):
                settings = KINDS[given.kind].complete(settings, stages[-1].output if index else None, model)
                KINDS[given.kind].check(settings)
            folder = Path(header.output) / f"round_{round}" / f"{index + 1:02d}_{given.called}"
            stages.append(stage := Stage(round, given.called, given.kind, folder, settings))
            outputs[stage.name] = {"output": str(stage.output)}
            made.add(str(stage.output))
            if given.kind == "train" and trains_a_policy(settings):
                model = str(stage.output)
    return stages


def run(file: PipelineFile, display: Display) -> int:
    """Do what is not done yet; the exit code (0, or 128 + the signal that ended a training run)."""
    stages = plan(file)
    with lock(Path(file.header.output)):
        for stage in stages:
            if code := _ensure(stage, display):
                return code
    display.show(f"results in {file.header.output}")
    return 0


def check(file: PipelineFile, display: Display) -> None:
    """Print what the pipeline would do. Raises ConfigError for whatever would stop it."""
    for stage in plan(file):
        KINDS[stage.kind].try_out(stage.settings)
        done = " (done)" if _read(stage.folder / "stage.json").get("done") else ""
        display.show(f"{stage}: {KINDS[stage.kind].about(stage.settings)}{done}\n    → {stage.output}")
    display.show("\nno problem found")


def _ensure(stage: Stage, display: Display) -> int:
    """Do a stage unless it is done; goes on with one that was interrupted."""
    record = stage.folder / "stage.json"
    before, depends = _read(record), fingerprint_settings(stage.settings)
    if before and before["depends"] != depends:
        changed = [key for key in {**before["depends"], **depends} if before["depends"].get(key) != depends.get(key)]
        moved = move_aside(stage.folder)
        display.note(f"{stage} is done anew: {', '.join(changed)} changed; what was there is now in {moved}")
        before = {}
    if before.get("done") and stage.output.exists():
        display.show(f"{stage}: done before ({_told(before['counts'])})")
        return 0
    seconds = before.get("seconds", 0.0)
    now = {"name": stage.name, "kind": stage.kind, "round": stage.round, "output": str(stage.output), "done": False}
    _write(record, now | {"seconds": seconds, "depends": depends})
    display.show(f"{stage}: {'goes on' if before else 'begins'}")
    begun = time.monotonic()
    counts, code = KINDS[stage.kind].run(stage.settings, stage.folder, stage.round, display)
    _free_memory()
    now |= {"done": not code, "counts": counts, "seconds": round(seconds + time.monotonic() - begun, 3)}
    _write(record, now | {"depends": depends})
    if not code:
        display.show(f"{stage}: {_told(counts)}; {now['seconds']:.1f} s")
    return code


def _free_memory() -> None:
    """Let go of the stage's models before the next one loads its own, maybe in another process."""
    gc.collect()
    torch.cuda.empty_cache()


def _read(record: Path) -> Record:
    return json.loads(record.read_text()) if record.exists() else {}


def _write(record: Path, state: Record) -> None:
    """Replace stage.json as a whole."""
    record.parent.mkdir(parents=True, exist_ok=True)
    aside = record.with_suffix(".writing")
    aside.write_text(json.dumps(state, indent=1) + "\n")
    os.replace(aside, record)


def _told(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in counts.items())
