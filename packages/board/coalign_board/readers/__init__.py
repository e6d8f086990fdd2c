"""What the pages ask of a run, one module a page: functions from the run's folder to what JSON can hold.

Open `metrics.py` first. A reader takes the folder and the parameters of the request. It raises ValueError for a
parameter that is wrong (400), FileNotFoundError for what the run has not (404), each with one sentence. It returns a
`Path` for a file to send, an image. The table of all readers is in `packages/board/coalign_board/server.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coalign.files import read_json_object
from coalign_board.catalog import find_within

LARGEST_OBJECT = 32 * 2**20  # bytes of a file of JSON
_LONGEST_NUMBER = 16  # digits, fewer than JavaScript can count to

Reader = Callable[[Path, Mapping[str, str]], Any]


def read_count(params: Mapping[str, str], name: str, default: int | None = None, *, least: int | None = 0) -> int:
    """Return a parameter that is a whole number, not below ``least``; without a ``default`` it has to be there.

    Raises ValueError for any other.
    """
    text = params.get(name, "")
    if not text and default is not None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or (least is not None and int(text) < least):
        raise ValueError(f"{name} is '{text:.40}'; expected a whole number{'' if least is None else f' from {least}'}")
    return int(text)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file in a run's folder. Raises FileNotFoundError, and ValueError for any other."""
    path = find_within(folder, folder / name)
    if not path.exists():
        raise FileNotFoundError(f"the run has no {name}")
    return read_json_object(path, LARGEST_OBJECT)


def parse_number(name: str) -> int:
    """Return the step in the name of a file, `step_12`; -1 for any other name."""
    digits = name.removeprefix("step_")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < _LONGEST_NUMBER else -1


def read_choice(params: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return a parameter that is one of ``choices``, by default the first. Raises ValueError for any other."""
    value = params.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"{name} is '{value:.40}'; expected one of {', '.join(choices)}")
    return value


def read_list(params: Mapping[str, str], name: str, max_items: int) -> list[str]:
    """Return a parameter that is a list of texts in JSON, empty by default. Raises ValueError for any other."""
    text = params.get(name, "[]")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or len(values) > max_items or not all(isinstance(value, str) for value in values):
        raise ValueError(f'{name} is {text[:80]!r}; expected a list of at most {max_items} names: ["one", "another"]')
    return values
