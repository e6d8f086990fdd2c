"""What the pages ask of a run, one module a page: functions from the run's folder to what JSON can hold.

Open `metrics.py` first. A reader takes the folder and the parameters of the request. It raises ValueError for a
parameter that is wrong (400), FileNotFoundError for what the run has not (404), each with one sentence. It returns a
`Path` for a file to send, an image. The table of all readers is in `coalign/board/server.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Reader = Callable[[Path, Mapping[str, str]], Any]


def read_count(params: Mapping[str, str], name: str, default: int) -> int:
    """Return a parameter that is a whole number from 0. Raises ValueError for any other."""
    text = params.get(name, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise ValueError(f"{name} is '{text}'; expected a whole number from 0")
    return int(text)


def read_list(params: Mapping[str, str], name: str, most: int) -> list[str]:
    """Return a parameter that is a list of texts in JSON, empty by default. Raises ValueError for any other."""
    text = params.get(name, "[]")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or len(values) > most or not all(isinstance(value, str) for value in values):
        raise ValueError(f'{name} is {text[:80]!r}; expected a list of at most {most} names: ["one", "another"]')
    return values
