"""Reads the parameters of a request. Each raises ValueError, with what would be right, for a value that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def read_number(params: Mapping[str, str], name: str, default: int | None = None, *, least: int | None = 0) -> int:
    """Return a parameter that is a whole number, not below ``least``; ``default`` None: it has to be there."""
    text = params.get(name, "")
    if not text and default is not None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or (least is not None and int(text) < least):
        raise ValueError(f"{name} is '{text:.40}'; expected a whole number{'' if least is None else f' from {least}'}")
    return int(text)


def read_choice(params: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return a parameter that is one of ``choices``, by default the first."""
    value = params.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"{name} is '{value:.40}'; expected one of {', '.join(choices)}")
    return value
