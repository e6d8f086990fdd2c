"""What a result depends on, as text that can be compared: contents of files, whatever their names and times."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from coalign.config.errors import Key, dotted
from coalign.config.introspect import changes_results, input_at
from coalign.config.schema import Section


def of_settings(settings: Section) -> dict[str, Any]:
    """Of every setting that changes results, by its dotted key: its value; of a path the contents of what lies there,
    and of a function of one's own its source, too."""
    found: dict[str, Any] = {}
    for key, value in _leaves(settings.model_dump(mode="json"), ()):
        if not changes_results(key, type(settings)):
            continue
        is_input = value is not None and input_at(key, type(settings)) is not None
        found[dotted(key)] = of_path(value) if is_input else value
        if isinstance(value, str) and ":" in value and key[-1] in ("fn", "algorithm", "module"):
            found[f"{dotted(key)} (source)"] = of_code(value)
    return found


def of_path(path: str | Path) -> str:
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


def of_code(name: str) -> str:
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
