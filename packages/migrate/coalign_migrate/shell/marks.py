"""Marks around those pieces of a text that are not known, such as `$(date)` in `run-$(date)`."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "\ue000", "\ue001"  # private characters, which no script has


def mark(source: str) -> str:
    """Return the source of a value that is not known, between marks."""
    return f"{_OPEN}{source}{_CLOSE}"


def is_known(text: object) -> bool:
    return not (isinstance(text, str) and _OPEN in text)


def show(text: str) -> str:
    """Return a text as the script has it, without marks."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def empty(text: str) -> str:
    """Return a text without its variables that are not set, as a shell would have it; others stay marked."""
    return re.sub(rf"{_OPEN}\$\{{?\w+\}}?{_CLOSE}", "", text)


def is_variable(text: str) -> bool:
    """Whether a text is nothing but one variable that is not set."""
    return bool(text) and not empty(text)
