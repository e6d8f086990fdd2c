"""Files and directories that a person may still want: nothing here deletes them."""

from __future__ import annotations

from itertools import count
from os.path import lexists
from pathlib import Path


def move_aside(path: Path) -> Path:
    """Rename a file or directory to the first free one of NAME.before-1, NAME.before-2, …; returns the new path."""
    names = (path.with_name(f"{path.name}.before-{number}") for number in count(1))
    return path.rename(next(name for name in names if not lexists(name)))
