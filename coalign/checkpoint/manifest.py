"""Checkpoints as files: lists their directories, and verifies their contents.

A checkpoint is ``checkpoints/step_N/`` of a run folder, and has a ``manifest.json`` with the size and the SHA-256 of
every other file. It is written last (coalign.checkpoint.folder), so without it there is no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coalign.files import describe_problem, hash_file, read_json_object

MANIFEST = "manifest.json"
Manifest = Mapping[str, tuple[int, str | None]]  # size and SHA-256 of each file; None in a checkpoint in memory


class CorruptCheckpoint(OSError):
    """A checkpoint whose files do not match its manifest."""


class RemoteError(OSError):
    """Checkpoints at a URL that cannot be read."""


def find_step(path: Path) -> int:
    """Return the step of a checkpoint's directory; -1 for any other."""
    number = path.name.removeprefix("step_")
    return int(number) if number.isascii() and number.isdigit() else -1


def list_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint's directory below this one, ascending, complete or not."""
    return sorted(step for path in directory.glob("step_*") if (step := find_step(path)) >= 0)


def read_manifest(path: Path) -> Manifest:
    """Return size and SHA-256 of each file of a checkpoint. Raises CorruptCheckpoint."""
    return parse_manifest(lambda: read_json_object(path / MANIFEST), str(path))


def parse_manifest(read: Callable[[], Any], checkpoint: str) -> Manifest:
    """Return size and SHA-256 of each file of the manifest that ``read()`` returns.

    Raises CorruptCheckpoint, naming the ``checkpoint``, if it cannot be read or names a file outside of the checkpoint.
    """
    try:
        files: dict[str, Any] = read()["files"]
        for name, entry in files.items():
            if type(entry["size"]) is not int or ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name:
                raise ValueError(f"{name[:80]!r} of {str(entry['size'])[:80]!r} bytes is no file of a checkpoint")
        return {name: (entry["size"], entry.get("sha256")) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CorruptCheckpoint(f"{checkpoint} has no readable {MANIFEST} ({describe_problem(problem)})") from problem


def compare_sizes(manifest: Manifest, sizes: Mapping[str, int], checkpoint: str) -> None:
    """Raise CorruptCheckpoint naming the first file that is missing or has another size than its manifest says."""
    for name, (size, _) in manifest.items():
        if name not in sizes:
            raise CorruptCheckpoint(f"{checkpoint}: {name} is missing")
        if sizes[name] != size:
            raise CorruptCheckpoint(f"{checkpoint}: {name} has {sizes[name]} bytes, {size!r:.30} were written")


def verify_checkpoint(path: Path, *, hashes: bool = True) -> None:
    """Check every file against the manifest. Raises CorruptCheckpoint naming the first file that differs.

    Without ``hashes`` only names and sizes are compared, and no contents are read.
    """
    manifest = read_manifest(path)
    files = [name for name in manifest if os.path.isfile(path / name)]
    compare_sizes(manifest, {name: (path / name).stat().st_size for name in files}, str(path))
    for name, (_, digest) in manifest.items():
        if hashes and digest is not None and hash_file(path / name) != digest:
            raise CorruptCheckpoint(f"{path}: the contents of {name} have changed since they were written")
