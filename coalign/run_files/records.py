"""Reads the records of metrics.jsonl and samples.jsonl. Lines end at `\\n` alone."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coalign.files import open_regular

MAX_LINE = 1 << 24  # bytes; a longer line is read as several damaged records
MAX_NESTING = 100  # lists and objects within each other
LARGEST_STEP = 1 << 53  # the largest integer that JavaScript counts exactly
LARGEST_NUMBER = 1e200  # sums of as many as a file can hold stay finite
_QUOTE = ord('"')
_TEXTS_OR_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.?)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)


def read_end(path: Path, max_bytes: int) -> bytes:
    """Return the last ``max_bytes`` bytes of a file, from the beginning of a line on; empty if it is missing.

    Raises OSError if it cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return b""
    return data[data.find(b"\n") + 1 :] if size > max_bytes else data


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line of metrics.jsonl or samples.jsonl; None if it is damaged, or has no `step`.

    NaN, infinities and numbers beyond the floats become None.
    """
    if line.count(b"[") + line.count(b"{") > MAX_NESTING and _measure_nesting(line) > MAX_NESTING:
        return None
    try:
        record = json.loads(line, parse_constant=lambda _: None, parse_float=_parse_finite)
    except (ValueError, RecursionError):
        return None
    return record if is_record(record) else None


def is_record(value: Any) -> bool:
    """Whether a value is an object that has the number of a step."""
    return type(value) is dict and type(step := value.get("step")) is int and 0 <= step < LARGEST_STEP


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that can be added to others."""
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER


def _parse_finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _measure_nesting(line: bytes) -> int:
    """Return how deep brackets are nested outside of texts."""
    depth = deepest = 0
    for match in _TEXTS_OR_BRACKETS.finditer(line):
        bracket = line[match.start()]
        if bracket != _QUOTE:
            depth += 1 if bracket in b"[{" else -1
            deepest = max(deepest, depth)
    return deepest


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of metrics.jsonl or samples.jsonl in order; damaged and unfinished lines are left out."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE):
            if line.endswith(b"\n") and (record := parse_record(line)) is not None:
                yield record


def select_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a record as floats (metrics.jsonl writes NaN as null)."""
    return {name: float(value) for name, value in record.items() if isinstance(value, bool) or is_number(value)}


def name_group(group: Any) -> str:
    """Name the group of a sample: `group 3`; those of evaluations count from -1 down, `evaluation prompt 1`."""
    if type(group) is not int:
        return "no group"
    return f"group {group}" if group >= 0 else f"evaluation prompt {-group}"
