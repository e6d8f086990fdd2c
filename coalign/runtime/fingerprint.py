"""What a result depends on, as text that can be compared: contents of files, whatever their names and times."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any


def of_path(path: str | Path) -> str:
    """Of the contents of a file, or of all files in a directory with their names (hidden ones aside)."""
    path = Path(path)
    if path.is_file():
        return _of_file(path)
    found = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path)
        if not any(part.startswith(".") for part in name.parts):
            found.update(f"{name}\0{_of_file(file)}\0".encode())
    return found.hexdigest()[:32]


def of_value(value: Any) -> str:
    """Of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _of_file(path: Path) -> str:
    stat = path.stat()
    return _digest(path.resolve(), stat.st_size, stat.st_mtime_ns)


@cache  # a pipeline asks for the same model again and again
def _digest(path: Path, size: int, changed: int) -> str:
    with open(path, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()[:32]
