"""Keeps files of checkpoints in the memory of a node: those that its ranks have written, and a copy of another node's.

Each node that takes part has a folder of its own in /dev/shm, and nobody reads the folder of another node through the
file system. Nothing here needs Ray: keepers.py beside it starts a keeper on each node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coalign.files import delete_path, delete_report, read_report
from coalign.run_files.checkpoints import MANIFEST, RUN, list_left_memory, list_steps, parse_manifest

NAME = ".keepers"  # in the run folder: which nodes have files
DIGITS = 16  # the length to which a node's id is cut in the name of its folder
BLOCK = 8 << 20  # bytes of a file that travel at once


class KeeperLost(Exception):
    """A keeper has ended, or its node is lost."""


@dataclass(frozen=True, slots=True)
class NodePath:
    """A path in memory that stands for one on each node: ``path`` below the node's own folder."""

    base: str  # a folder's path without the node
    path: str

    def find(self, node: str) -> str:
        """Return the path on a node."""
        return f"{name_folder(self.base, node)}/{self.path}"


def name_folder(base: str, node: str) -> str:
    """Return a node's own folder."""
    return f"{base}-{node[:DIGITS]}"


def has_keepers(run: Path) -> bool:
    """Whether the memory of several nodes may have checkpoints of the run in a folder."""
    return (run / NAME).exists()


def find_partners(nodes: Sequence[str]) -> dict[str, str]:
    """Return which other node holds a copy of each node's files: the next one in a ring. A single node has none."""
    return dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True)) if len(nodes) > 1 else {}


def find_missing(written: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the files that each node's partner still lacks, by the node that has ``written`` them: bytes by name.

    OSError if two nodes have written a file of one name that differs in length.
    """
    sizes: dict[str, int] = {}
    for node, files in written.items():
        for name, size in files.items():
            if sizes.setdefault(name, size) != size:
                raise OSError(f"several nodes have written {name}, with {sizes[name]} and (on {node}) {size} bytes")
    return {
        node: {name: size for name, size in written[node].items() if name not in written[partner]}
        for node, partner in find_partners([*written]).items()
    }


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The share of a checkpoint on one node: the text of its manifest, and the bytes of each file."""

    manifest: str
    files: Mapping[str, int]


@dataclass(slots=True)
class SpreadStep:
    """A checkpoint that lies on several nodes: the bytes of each of its files, and which nodes hold it."""

    manifest: str
    sizes: Mapping[str, int]
    holders: dict[str, list[str]] = field(default_factory=dict)  # nodes by file; files that nobody holds are left out

    @property
    def lost(self) -> list[str]:
        """The files that no node holds."""
        return [name for name in self.sizes if name not in self.holders]

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the files below a folder of the checkpoint (empty: all of them), with their bytes."""
        return {name: size for name, size in self.sizes.items() if name.startswith(f"{folder}/" if folder else "")}

    def plan_fetches(self, node: str, folder: str = "", without: str = "") -> dict[str, dict[str, int]]:
        """Return which files below a folder a node should get, by the node that sends them; not those below another.

        Of several that hold a file the one that sends the fewest bytes is taken.
        """
        sent, plan = dict[str, int](), dict[str, dict[str, int]]()
        for name, size in self.list_files(folder).items():
            if node not in self.holders[name] and not (without and name.startswith(f"{without}/")):
                source = min(self.holders[name], key=lambda holder: sent.get(holder, 0))
                plan.setdefault(source, {})[name] = size
                sent[source] = sent.get(source, 0) + size
        return plan


def merge_steps(stored: Mapping[str, Mapping[int, StoredStep]]) -> dict[int, SpreadStep]:
    """Return the checkpoints that nodes hold together, by step.

    Files of one step count together if their nodes have the same manifest: two drivers may have written it. Of two
    such checkpoints the one that lacks fewer files counts.
    """
    candidates: dict[int, dict[str, SpreadStep]] = {}
    for node, steps in stored.items():
        for step, held in steps.items():
            try:
                sizes = parse_manifest(held.manifest)
            except ValueError:  # the node's processes ended while it was written
                continue
            spread = candidates.setdefault(step, {}).setdefault(held.manifest, SpreadStep(held.manifest, sizes))
            for name, size in sizes.items():
                if held.files.get(name) == size:
                    spread.holders.setdefault(name, []).append(node)
    return {step: min(candidates[step].values(), key=lambda spread: len(spread.lost)) for step in sorted(candidates)}


class Keeper:
    """Keeps checkpoints in the folder of its node; paths are relative to it.

    ``step_N/`` holds some of a checkpoint's files, and a manifest of all of them. While a step is written, its folder
    has another name (coalign.files.write_atomically).
    """

    def __init__(self, base: str, node: str, run: str, living: Collection[str]) -> None:
        """Delete the folders of nodes that do not live, and of runs that are gone; ``run`` is the run's folder."""
        self._folder = Path(name_folder(base, node))
        self._run = run
        memory, kept = self._folder.parent, {name_folder(base, living_node) for living_node in living}
        left = [path for path in memory.glob(f"{os.path.basename(base)}-*") if str(path) not in kept]
        for path in (*left, *list_left_memory(memory)):
            delete_path(path)

    def open(self) -> None:
        """Make the folder, and delete incomplete files. Raises PermissionError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} would hold checkpoints of {self._run}, and belongs to another user")
        with suppress(FileExistsError):
            (self._folder / RUN).symlink_to(self._run)
        for left in self._folder.glob(".writing-*"):
            delete_path(left)

    def list_files(self, directory: str) -> dict[str, int]:
        """Return the bytes of each file in a directory, by its path there."""
        top = self._folder / directory
        files = (path for path in top.rglob("*") if path.is_file())
        return {str(path.relative_to(top)): path.stat().st_size for path in files}

    def list_steps(self) -> dict[int, StoredStep]:
        """Return this node's share of each checkpoint that has a manifest."""
        stored = {}
        for step in list_steps(self._folder):
            with suppress(OSError):
                manifest = (self._folder / f"step_{step}" / MANIFEST).read_text()
                stored[step] = StoredStep(manifest, self.list_files(f"step_{step}"))
        return stored

    def read_report(self, path: str) -> str | None:
        """Return what rank 0 has reported of a directory, see coalign.files.read_report."""
        return read_report(self._folder / path)

    def delete_report(self, path: str) -> None:
        delete_report(self._folder / path)

    def read(self, path: str, offset: int) -> np.ndarray[Any, Any]:
        """Return a block of a file, u8[BLOCK] or, at its end, less. OSError without that file."""
        with open(self._folder / path, "rb") as file:
            file.seek(offset)
            return np.frombuffer(file.read(BLOCK), np.uint8)

    def write(self, path: str, blocks: Iterable[np.ndarray[Any, Any]]) -> None:
        """Write a file that another node has sent. OSError if there is no memory for it; then nothing is left."""
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(target, "wb", buffering=0) as file:
                for block in blocks:
                    view = block.data
                    while view:
                        view = view[file.write(view) :]
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def open_step(self, step: int, manifest: str) -> None:
        """Make room for further files of a checkpoint; those of another one of the same step go."""
        target = self._folder / f"step_{step}"
        if (target / MANIFEST).exists() and (target / MANIFEST).read_text() == manifest:
            return
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        (target / MANIFEST).write_text(manifest)

    def seal(self, directory: str, step: int, manifest: str) -> None:
        """Turn a directory that was written into this node's share of a checkpoint."""
        aside, target = self._folder / directory, self._folder / f"step_{step}"
        aside.mkdir(parents=True, exist_ok=True)
        (aside / MANIFEST).write_text(manifest)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)

    def keep(self, steps: Collection[int]) -> None:
        """Delete all checkpoints but those of these steps."""
        for step in list_steps(self._folder):
            if step not in steps:
                (self._folder / f"step_{step}" / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)

    def clear(self) -> None:
        """Free the memory."""
        delete_path(self._folder)
