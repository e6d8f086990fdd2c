"""Evaluates `[ … ]` and `[[ … ]]`: True, False, or None where only a machine could say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from coalign_migrate.shell.expansion import WordExpander, matches
from coalign_migrate.shell.marks import empty, is_known

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_FILES = {"-f": os.path.isfile, "-d": os.path.isdir, "-e": os.path.exists, "-s": os.path.isfile, "-r": os.path.exists}


def evaluate_condition(words: list[str], expander: WordExpander) -> bool | None:
    """Return whether a condition holds; ``words`` are as they are written, with `[`, `[[` or `test` before them."""
    inner = words[1:-1] if words[0] != "test" else words[1:]
    return _evaluate_any(inner, expander)


def _evaluate_any(words: list[str], expander: WordExpander) -> bool | None:
    for operators, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        for index, word in enumerate(words):
            if word in operators and words[:index].count("(") == words[:index].count(")") and index:
                sides = [_evaluate_any(words[:index], expander), _evaluate_any(words[index + 1 :], expander)]
                return decisive if decisive in sides else None if None in sides else not decisive
    if words[:1] == ["!"]:
        status = _evaluate_any(words[1:], expander)
        return None if status is None else not status
    if words[:1] == ["("] and words[-1:] == [")"]:
        return _evaluate_any(words[1:-1], expander)
    return _evaluate_one(words, expander)


def _evaluate_one(words: list[str], expander: WordExpander) -> bool | None:
    if len(words) == 2:
        return _evaluate_unary(words[0], words[1], expander)
    if len(words) > 3 and words[1] == "=~":
        words = [*words[:2], "".join(words[2:])]
    texts = [empty(expander.expand_text(word)) for word in words]
    if not all(map(is_known, texts)):
        return None
    if len(words) == 1:
        return bool(texts[0])
    if len(words) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        same = left == right if words[2][:1] in "'\"" else matches(left, right)
        return (not same) if operator == "!=" else same
    if operator == "=~":
        return _search(right, left)
    if operator in ("<", ">"):
        return left < right if operator == "<" else left > right
    if operator in _NUMBERS and all(re.fullmatch(r"-?\d+", text) for text in (left, right)):
        return _NUMBERS[operator](int(left), int(right))
    return None


def _evaluate_unary(operator: str, word: str, expander: WordExpander) -> bool | None:
    text = expander.expand_text(word)
    if operator == "-v":
        return expander.variables.get(text) is not None
    if not is_known(text := empty(text)):
        return None
    if operator in ("-z", "-n"):
        return bool(text) == (operator == "-n")
    return _FILES[operator](text) if operator in _FILES else None


def _search(pattern: str, text: str) -> bool | None:
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None
