"""Checkpoints as files: lists their directories, and verifies their contents.

A checkpoint is ``checkpoints/step_N/`` of a run folder, and has a ``manifest.json`` with the size and the SHA-256 of
every other file. It is written last (coalign.engine.hooks.checkpoint_folder), so without it there is no checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from coalign.files import describe_problem, hash_file, read_json_object

MANIFEST = "manifest.json"
MEMORY = Path("/dev/shm")  # checkpoints in memory, each run in a folder `coalign-USER-HASH`
LEFT_SECONDS = 24 * 3600.0
RUN = "run"  # a link in such a folder to the folder of the run


class CorruptCheckpoint(OSError):
    """A checkpoint whose files do not match its manifest."""


def name_memory_folder(run: Path) -> Path:
    """Return the folder of the run's checkpoints in memory."""
    digest = hashlib.sha256(str(run.absolute()).encode()).hexdigest()
    return MEMORY / f"coalign-{os.getuid()}-{digest[:16]}"


def list_left_memory(memory: Path) -> list[Path]:
    """Return the user's folders in ``memory`` of runs that were deleted, to which nobody has written for a day."""
    return [path for path in memory.glob(f"coalign-{os.getuid()}-*") if _is_left(path)]


def _is_left(folder: Path) -> bool:
    try:
        return not (folder / RUN).readlink().exists() and time.time() - folder.stat().st_mtime > LEFT_SECONDS
    except OSError:  # it has no link, or another process has just deleted it
        return False


def find_step(path: Path) -> int:
    """Return the step of a checkpoint's directory; -1 for any other."""
    number = path.name.removeprefix("step_")
    return int(number) if number.isascii() and number.isdigit() else -1


def list_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint's directory below this one, ascending, complete or not."""
    return sorted(step for path in directory.glob("step_*") if (step := find_step(path)) >= 0)


def read_manifest(path: Path) -> dict[str, tuple[int, str | None]]:
    """Return size and SHA-256 (None for a checkpoint in memory) of each file. Raises CorruptCheckpoint."""
    try:
        files: dict[str, Any] = read_json_object(path / MANIFEST)["files"]
        for name, entry in files.items():
            if type(entry["size"]) is not int or ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name:
                raise ValueError(f"{name[:80]!r} of {str(entry['size'])[:80]!r} bytes is no file of a checkpoint")
        return {name: (entry["size"], entry.get("sha256")) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CorruptCheckpoint(f"{path} has no readable {MANIFEST} ({describe_problem(problem)})") from problem


def verify_checkpoint(path: Path, *, hashes: bool = True) -> None:
    """Check every file against the manifest. Raises CorruptCheckpoint naming the first file that differs.

    Without ``hashes`` only names and sizes are compared, and no contents are read.
    """
    for name, (length, digest) in read_manifest(path).items():
        if not os.path.isfile(path / name):
            raise CorruptCheckpoint(f"{path}: {name} is missing")
        if (size := (path / name).stat().st_size) != length:
            raise CorruptCheckpoint(f"{path}: {name} has {size} bytes, {length!r:.30} were written")
        if hashes and digest is not None and hash_file(path / name) != digest:
            raise CorruptCheckpoint(f"{path}: the contents of {name} have changed since they were written")
