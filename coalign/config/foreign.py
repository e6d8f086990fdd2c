"""Keys of other frameworks, and keys of Coalign that were renamed, in errors: what an unknown key is called here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coalign.config.errors import Key
from coalign.config.foreign_keys import TRL, VERL

_MOST = 3  # keys of a section that a message translates


# Keys of Coalign that have another name now, by their paths.
RENAMED = {"data.on_missing_key": "data.bad_rows"}


def describe_renaming(key: Key) -> str | None:
    """Say what a key of an earlier version is called now, as the end of a sentence; None for others."""
    new = RENAMED.get(".".join(map(str, key)))
    return None if new is None else f"is called {new} now"


def translate_key(key: Key, value: Any) -> str | None:
    """Say what a key of TRL or verl, or those below it, are called here, as the end of a sentence; None for others."""
    path = ".".join(map(str, key))
    if found := VERL.describe(path):
        paths = [name for name in _list_paths(path, value) if name != path]
        below = [f"{name} is {said}" for name in paths if (said := VERL.describe(name))]
        return f"is verl's; here {', '.join(below[:_MOST]) or f'it is {found}'}"
    if key and (found := TRL.describe(str(key[-1]))):
        return f"is TRL's; here it is {found}"
    return None


def _list_paths(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of all values at ``path`` and below that hold no further keys."""
    if not isinstance(value, dict):
        yield path
        return
    for name, item in value.items():
        yield from _list_paths(f"{path}.{name}", item)
