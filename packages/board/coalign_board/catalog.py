"""Finds run folders below a directory, and keeps what is read within it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_DEEPEST = 6  # folders below the directory: pipelines and sweeps keep runs in folders of their own
_MAX_FOLDERS = 20_000  # one search looks into no more
_KEPT_SECONDS = 5.0  # how long the result of a search is used


class RunCatalog:
    """The run folders below ``root``, which may itself be one. A run's id is its path, with `/` between folders.

    Example:
        catalog = RunCatalog(Path("runs"))
        catalog.find("gsm8k/sft")   # Path("runs/gsm8k/sft")
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise FileNotFoundError(f"there is no directory {root}")
        self.root = root.resolve()
        # The id of the root itself would be empty, which is no part of an address.
        self._base = self.root.parent if is_run(self.root) else self.root
        self._ids: list[str] = []
        self._searched = -_KEPT_SECONDS

    def list_ids(self) -> list[str]:
        """List the ids of all runs, in the order of their names. A list of the last seconds is used again."""
        if (now := time.monotonic()) - self._searched >= _KEPT_SECONDS:
            self._ids = sorted(folder.relative_to(self._base).as_posix() for folder in _search(self.root))
            self._searched = now
        return self._ids

    def find(self, run: str) -> Path:
        """Return the folder of a run. ValueError for a path that leads out of the root, FileNotFoundError for none."""
        folder = find_within(self.root, self._base / run)
        if not is_run(folder):
            raise FileNotFoundError(f"there is no run '{run}'")
        return folder


def is_run(folder: Path) -> bool:
    """Return whether this is the folder of a run, which may not have come to its first step."""
    return (folder / "config.yaml").is_file() and any(
        (folder / name).is_file() for name in ("metrics.jsonl", "log.txt", ".lock")
    )


def find_within(folder: Path, path: Path) -> Path:
    """Return the path without links. Raises ValueError if it leads out of the folder."""
    try:
        real = path.resolve()
        if real.is_relative_to(folder.resolve()):
            return real
    except (OSError, RuntimeError):  # a loop of links, a name that is too long
        pass
    except ValueError:  # a null character
        pass
    raise ValueError(f"'{path.name}' leads out of the folder")


def _search(root: Path) -> Iterator[Path]:
    waiting, looked = [(root, 0)], 0
    while waiting and looked < _MAX_FOLDERS:
        folder, depth = waiting.pop()
        looked += 1
        if is_run(folder):
            yield folder
            continue
        if depth == _DEEPEST:
            continue
        try:
            with os.scandir(folder) as entries:
                waiting += [
                    (Path(entry.path), depth + 1)
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                ]
        except OSError:  # a folder of another user, or one that was just deleted
            continue
