"""Output that survives a kill: finished work is kept beside the output file, which appears complete at the end.

Whether kept work may be used is decided by its fingerprint: the settings and the contents of the files that the results
depend on, whatever the names and times of these files are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from coalign.config.errors import format_key
from coalign.config.introspect import find_input, list_relevant_settings
from coalign.config.schema import Section
from coalign.config.secrets import hide_secrets
from coalign.engine.hooks.provenance import fingerprint_source
from coalign.engine.hooks.run_folder import replace_non_finite
from coalign.files import hash_file, require_free_output, write_atomically
from coalign.hub import is_hub_name, pin
from coalign.run_files.lock import lock_file

log = logging.getLogger(__name__)

JsonRecord = dict[str, Any]
T = TypeVar("T")


class RecordStream:
    """Hands each record to ``take`` at once and keeps nothing on disk. A context manager."""

    done = 0  # units finished by an earlier call

    def __init__(self, take: Callable[[JsonRecord], None]) -> None:
        self._take = take
        self._units: list[list[JsonRecord]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, unit: Sequence[JsonRecord]) -> None:
        """Hand on the records of a finished unit of work."""
        self._units.append(list(unit))
        for record in unit:
            self._take(record)

    def units(self) -> Iterator[list[JsonRecord]]:
        """Yield the records of every unit so far."""
        yield from self._units

    def finish(self) -> None:
        """Complete the output, when all units are there."""


class ResumableOutput(RecordStream):
    """Keeps finished units in ``OUTPUT.partial``: a line with the ``fingerprint``, then one line for each unit.

    ``done`` units are there already if an earlier call with the same fingerprint was killed. A file with another
    fingerprint starts over, with a warning that names the difference. An output that exists is replaced if such a call
    has written it, or with ``overwrite``; else FileExistsError. ValueError for one that is one of the ``inputs``.
    Raises FolderInUse while another process writes.
    """

    def __init__(
        self, output: Path, fingerprint: Mapping[str, Any], inputs: Sequence[str] = (), *, overwrite: bool = False
    ) -> None:
        self.output = output
        self.path = _name_partial(output)
        self.done = 0
        fingerprint = json.loads(json.dumps(fingerprint))
        require_free_output(self.path, inputs, overwrite=True)
        require_free_output(output, inputs, overwrite=overwrite or self._is_started(fingerprint))
        self._file = lock_file(self.path, f"{output} is being written by another process")
        self._resume(fingerprint)

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if error[0] is not None and self.done:
            log.warning("%s keeps what is finished: the same call continues from there", self.path)

    def add(self, unit: Sequence[JsonRecord]) -> None:
        self._write(replace_non_finite(list(unit)))
        self.done += 1

    def units(self) -> Iterator[list[JsonRecord]]:
        with open(self.path, encoding="utf-8") as lines:
            next(lines)
            yield from map(json.loads, lines)

    def finish(self) -> None:
        """Write the output, one line a record, and delete the partial file."""
        with write_atomically(self.output, flush=True) as aside, open_records(aside) as out:
            for unit in self.units():
                out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in unit)
        self.path.unlink()

    def _is_started(self, fingerprint: Mapping[str, Any]) -> bool:
        if not self.path.is_file():
            return False
        with open(self.path, "rb") as file:
            return _read_line(file.readline(), dict) == fingerprint

    def _resume(self, fingerprint: Mapping[str, Any]) -> None:
        """Count the complete lines and cut off the rest; start over if the fingerprint is another one."""
        self._file.seek(0)
        header = self._file.readline()
        saved = _read_line(header, dict) or {}
        if saved == fingerprint:
            end = len(header)
            for line in self._file:
                if _read_line(line, list) is None:  # what a kill or a power failure has cut
                    break
                self.done, end = self.done + 1, end + len(line)
            self._file.truncate(end)
            return
        if saved:
            changed = sorted(key for key in {*saved, *fingerprint} if saved.get(key) != fingerprint.get(key))
            log.warning("%s: %s changed since it was begun, so it starts over", self.path, " and ".join(changed))
        elif header:
            log.warning("%s: its first line cannot be read, so it starts over", self.path)
        self._file.truncate(0)
        self._write(fingerprint)

    def _write(self, value: Any) -> None:
        self._file.write((json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))
        self._file.flush()


def _name_partial(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


def open_records(path: Path) -> TextIO:
    """Open a file for lines of JSON. Half a surrogate pair, which UTF-8 does not have, is written as its escape."""
    return open(path, "w", encoding="utf-8", errors="backslashreplace")


def _read_line(line: bytes, record_type: type[T]) -> T | None:
    """Return the value of a complete line of JSON; None if it is not one, or of another kind."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, record_type) else None


def list_inputs(settings: Section) -> list[str]:
    """List the paths that a command reads by its settings: of models, of data, and of files such as templates."""
    texts = ((key, value) for key, value in list_relevant_settings(settings) if isinstance(value, str))
    return [
        value
        for key, value in texts
        if os.path.isfile(value) or (find_input(key, type(settings)) is not None and key[-1] != "root")
    ]


def require_writable(output: Path, settings: Section, overwrite: bool) -> None:
    """Raise what `ResumableOutput` raises for an output that it cannot write, before anything slow is done."""
    is_started = _name_partial(output).is_file()
    require_free_output(output, list_inputs(settings), overwrite=overwrite or is_started)


def fingerprint_settings(settings: Section) -> dict[str, Any]:
    """Return the value of every setting that changes results, by its dotted key.

    A path stands for the contents of what lies there, a name of the hub for its commit, the name of a variable for a
    secret. A user's own function is followed by that of its source file.
    """
    values: dict[str, Any] = {}
    for key, value in list_relevant_settings(settings):
        if value is not None and find_input(key, type(settings)) is not None:
            value = pin(value) if is_hub_name(value) else fingerprint_path(value)
        values[format_key(key)] = hide_secrets(value)
        values |= fingerprint_source(key, value)
    return values


def fingerprint_path(path: str | Path) -> str:
    """Return a hash of a file, of the files that a pattern matches, or of the files in a directory with their names.

    Hidden files of a directory do not count.
    """
    path = Path(path)
    if path.is_file():
        return _hash_cached(path)
    if not path.is_dir():
        named = [(match, Path(match)) for match in sorted(glob(str(path), recursive=True))]
    else:
        files = [(file.relative_to(path), file) for file in sorted(path.rglob("*")) if file.is_file()]
        named = [(str(name), file) for name, file in files if not any(level.startswith(".") for level in name.parts)]
    joined = hashlib.sha256()
    for name, file in named:
        joined.update(f"{name}\0{_hash_cached(file)}\0".encode())
    return joined.hexdigest()[:32]


def _hash_cached(path: Path) -> str:
    stat = path.stat()
    return _hash_version(path.resolve(), stat.st_size, stat.st_mtime_ns)


@cache  # a pipeline asks for the same model again and again
def _hash_version(path: Path, size: int, changed: int) -> str:
    return hash_file(path)[:32]
