"""Reads which checkpoints a run has and where, whether they are complete, and from which one a start would go on."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalign.checkpoint.folder import MEMORY, RUN
from coalign.checkpoint.manifest import MANIFEST, CorruptCheckpoint, list_steps, read_manifest, verify_checkpoint
from coalign.files import read_json_object
from coalign.run_files.records import read_end
from coalign_board.catalog import find_within
from coalign_board.readers import read_count
from coalign_board.readers.configuration import read_settings

_LOG_BYTES = 16 * 2**20  # read from the end of log.txt
_COPIED = re.compile(rb" step (\d{1,15}) is copied to ")  # a line of coalign.checkpoint.remote in log.txt


def read_checkpoints(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the `checkpoints`, newest first, and from which of them the same command would go on.

    Each has its `step`, its `place` (disk or memory), its bytes by part, the `problem` of one that is not whole, and
    whether it is the `best` one, that of the link `model` (`linked`), or that which a start would `resume`. Names and
    sizes of files are compared, not their contents: see ``read_verification``. `copied` are the steps that log.txt
    says have a copy at `copies_to`; they are not looked at.
    """
    runtime = {key.removeprefix("runtime."): value for key, value in read_settings(folder).items()}
    disk = find_within(folder, folder / "checkpoints")
    checkpoints = [_describe(disk / f"step_{step}", step, "disk") for step in list_steps(disk)]
    for memory in _list_memory_folders(folder):
        checkpoints += [_describe(memory / f"step_{step}", step, "memory") for step in list_steps(memory)]
    checkpoints.sort(key=lambda checkpoint: (-checkpoint["step"], checkpoint["place"]))
    best, resume, linked = _read_best(disk), runtime.get("resume", "auto"), (folder / "model").resolve().parent
    chosen = _choose(checkpoints) if resume == "auto" else None
    for checkpoint in checkpoints:
        checkpoint["best"] = checkpoint["place"] == "disk" and best is not None and checkpoint["step"] == best["step"]
        checkpoint["linked"] = linked == Path(checkpoint["path"])
        checkpoint["resume"] = checkpoint is chosen
    return {
        "checkpoints": checkpoints,
        "writing": [path.name.removeprefix(".writing-") for path in disk.glob(".writing-step_*")],
        "best": best and best | {"metric": runtime.get("best"), "mode": runtime.get("best_mode", "max")},
        "resume": resume,
        "keep": runtime.get("keep"),
        "copies_to": runtime.get("save_copies_to"),
        "copied": _list_copied(find_within(folder, folder / "log.txt")) if runtime.get("save_copies_to") else [],
    }


def has_checkpoints(folder: Path) -> bool:
    """Whether there is a checkpoint of a run on this machine: on the disk, whole or being written, or in memory."""
    on_disk = any((folder / "checkpoints").glob("*step_*"))
    return on_disk or any(list_steps(memory) for memory in _list_memory_folders(folder))


def read_verification(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Read all files of the checkpoint on disk of a `step`, and compare their contents with its manifest.

    The `problem` is null if they are as they were written. It takes as long as reading the checkpoint.
    """
    step = read_count(params, "step")
    path = find_within(folder, folder / "checkpoints" / f"step_{step}")
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint of step {step} on the disk")
    return {"step": step, "problem": _find_problem(path, hashes=True)}


def _list_memory_folders(folder: Path) -> list[Path]:
    """Return the folders in this machine's memory whose link leads to the run's folder (coalign.checkpoint.folder).

    There is one, or none; on a machine that no trained model or driver of the run is on there is none.
    """
    run = folder.resolve()
    return [path for path in MEMORY.glob(f"coalign-{os.getuid()}-*") if (path / RUN).resolve() == run]


def _describe(path: Path, step: int, storage: str) -> dict[str, Any]:
    problem, sizes = _find_problem(path, hashes=False), Counter[str]()
    if problem is None:
        for name, (size, _) in read_manifest(path).items():
            sizes["/".join(Path(name).parts[: 2 if name.startswith("models/") else 1])] += size
    when = (path / MANIFEST).stat().st_mtime if problem is None else None
    return {"step": step, "place": storage, "path": str(path), "problem": problem, "sizes": sizes, "time": when}


def _find_problem(path: Path, *, hashes: bool) -> str | None:
    try:
        verify_checkpoint(path, hashes=hashes)
    except (CorruptCheckpoint, OSError) as problem:
        return str(problem)
    return None


def _choose(checkpoints: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest complete checkpoint, from disk before memory, as coalign.checkpoint.resume does."""
    complete = (checkpoint for checkpoint in checkpoints if checkpoint["problem"] is None)
    return max(complete, key=lambda checkpoint: (checkpoint["step"], checkpoint["place"] == "disk"), default=None)


def _read_best(disk: Path) -> dict[str, Any] | None:
    """Return step and value of the best step so far, which the newest checkpoint knows; None without one."""
    for step in reversed(list_steps(disk)):
        try:
            best = read_json_object(disk / f"step_{step}" / "state.json")["hooks"]["Save"]["best"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        match best:
            case [int() | float() as value, int(at)]:
                return {"value": value, "step": at}
        return None
    return None


def _list_copied(log: Path) -> list[int]:
    return sorted({int(match[1]) for match in _COPIED.finditer(read_end(log, _LOG_BYTES))})
