"""Checkpoints that are whole or not there: written aside, hashed, flushed, renamed.

``checkpoints/step_N/`` holds ``state.json`` (step, cursor, recipe state, metrics), ``buffer.pt`` (batches between
environment and trainer), ``models/<name>/`` (what that backend needs to go on bit for bit), ``hf/`` (the trained model
as a Hugging Face directory) and, last of all, ``manifest.json`` with the size and SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class CorruptCheckpoint(RuntimeError):
    """A checkpoint that is not what its manifest says."""


class Checkpoints:
    """The checkpoints of one run folder: ``keep`` newest ones, and the best by a metric if one is watched."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending (finished is not verified)."""
        found = [p.name.removeprefix("step_") for p in self.directory.glob("step_*") if (p / MANIFEST).exists()]
        return sorted(int(name) for name in found if name.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Make the checkpoint of ``step``: ``fill(directory)`` writes its files.

        Raises what writing raises (a full disk is an OSError, here or in a worker) and then leaves nothing behind; the
        checkpoints before it stay as they are.
        """
        final, aside = self.path(step), self.directory / f".writing-step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            fill(aside)
            _seal(aside)
            # What an interrupted `prune` left, or this run's own before a rollback.
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _flush(self.directory)
        return final

    def point(self, step: int) -> None:
        """Let `model`, beside the folder of checkpoints, be the Hugging Face directory of this step's."""
        link = self.directory.parent / "model"
        aside = link.with_name(".model.writing")
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(self.path(step) / "hf", link.parent))
        os.replace(aside, link)

    def prune(self, best: int | None) -> None:
        """Delete all but the newest ``keep`` and the ``best`` step."""
        for step in self.steps()[: -self.keep]:
            if step != best:
                # The manifest goes first: a half-deleted directory must not look like a checkpoint.
                (self.path(step) / MANIFEST).unlink()
                shutil.rmtree(self.path(step))

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; those that do not are reported and passed over."""
        for step in reversed(self.steps()):
            try:
                verify(self.path(step))
            except CorruptCheckpoint as problem:
                log.warning("%s; trying the one before", problem)
            else:
                return self.path(step)
        return None


def verify(path: Path) -> None:
    """Check every file against the manifest. Raises CorruptCheckpoint naming the first file that differs."""
    try:
        files: dict[str, Any] = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as problem:
        raise CorruptCheckpoint(f"{path} has no readable {MANIFEST} ({problem})") from problem
    for name, expected in files.items():
        file = path / name
        if not file.exists():
            raise CorruptCheckpoint(f"{path}: {name} is missing")
        if (size := file.stat().st_size) != expected["size"]:
            raise CorruptCheckpoint(f"{path}: {name} has {size} bytes, {expected['size']} were written")
        if _digest(file) != expected["sha256"]:
            raise CorruptCheckpoint(f"{path}: the contents of {name} have changed since they were written")


def _seal(path: Path) -> None:
    """Flush all files of a directory to disk and write the manifest over them."""
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        files[str(file.relative_to(path))] = {"size": file.stat().st_size, "sha256": _digest(file)}
        _flush(file)
    with open(path / MANIFEST, "w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _digest(file: Path) -> str:
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
