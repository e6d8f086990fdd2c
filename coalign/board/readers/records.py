"""Reads the records of a run folder while the run writes them: JSON lines, and the parameters of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

POINTS = 1000  # of a curve; a screen has no more
T = TypeVar("T")


def read_steps(path: Path, *prefixes: str) -> list[dict[str, Any]]:
    """Return the finite numbers of each line that has a step; with ``prefixes`` only `step` and those metrics.

    A later line of a step adds to the earlier one. Lines that cannot be read, such as one being written, are left out.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in read_records(path):
        step = record.get("step")
        if not isinstance(step, int):
            continue
        chosen = {
            name: value
            for name, value in record.items()
            if is_number(value) and (not prefixes or name.startswith(prefixes))
        }
        if chosen:
            steps.setdefault(step, {"step": step}).update(chosen)
    return [steps[step] for step in sorted(steps)]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of each line of a file; nothing if the file is missing."""
    if not path.is_file():
        return
    with open(path, "rb") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number; `true` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def thin(rows: Sequence[T], most: int = POINTS) -> list[T]:
    """Return at most ``most`` rows, evenly spread, the last one among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[(number + 1) * len(rows) // most - 1] for number in range(most)]


def read_integer(params: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a parameter as a number from 0. ValueError if it is none, or if it is missing and has no ``default``."""
    text = params.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ValueError(f"{name}: expected a whole number from 0, got {text!r:.40}")
    return int(text)


def read_choice(params: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return a parameter that is one of ``choices``, by default the first. ValueError for any other."""
    value = params.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r:.40}")
    return value
