"""Reads the parameters of a request. Each raises ValueError, with what would be right, for a value that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def read_number(params: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a parameter that is a whole number from 0; ``default`` None: it has to be there."""
    text = params.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ValueError(f"{name} is '{text:.40}'; expected a whole number from 0")
    return int(text)


def read_choice(params: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return a parameter that is one of ``choices``, by default the first."""
    value = params.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"{name} is '{value:.40}'; expected one of {', '.join(choices)}")
    return value
