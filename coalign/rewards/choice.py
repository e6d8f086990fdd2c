"""Multiple choice: which letter did the response settle on?"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated

from pydantic import Field

from coalign.rewards.rules import read_truth
from coalign.types import Sample

_DECORATION = r"[\s*_$`\"'(\[{<]*(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{\s*)*[\s*_$`\"'(\[{<]*"
_SAYS = r"[*_]{0,3}(?:\s+is\b[*_]{0,3}\s*:?|\s*[:=])"  # bold may end on either side of the colon
_MARK = re.compile(
    rf"####|\\boxed(?=\s*\{{)|\banswer{_SAYS}|\b(?:correct|right|best|final)\s+(?:option|choice){_SAYS}",
    re.IGNORECASE,
)
_LONGEST = 200  # characters behind a mark


def multiple_choice(
    sample: Sample, *, answer_key: str = "answer", choices: Annotated[str, Field(min_length=2)] = "ABCDE"
) -> float:
    """1.0 if the letter that the response settles on is that of ``row[answer_key]``, else 0.0.

    The truth is one of ``choices`` (`B`, `(B)`, `B. Paris`), or an index from 0 if the row has a whole number. The
    prediction is read after `</think>`, by this policy:

    1. the letter right behind the last mark that has one: `####`, `\\boxed{}`, "answer is", "answer:", "correct (right,
       best, final) option is" or "choice is", with or without brackets, quotes, bold;
    2. without such a mark, a last line that holds nothing but a letter (`B`, `(b)`, `**B.**`), or that begins with one
       and a bracket or full stop (`B) Paris`);
    3. else none. Nor does a letter count that further letters follow ("A or B", "A, C"), that is a word ("A train"), or
       that merely occurs in the text.

    Small letters count where nothing but punctuation follows. Raises ValueError for a truth that is none of the
    choices.
    """
    expected = _truth(sample, answer_key, choices)
    return float(find_choice(sample.response.rpartition("</think>")[2], choices) == expected)


def find_choice(text: str, choices: str) -> str | None:
    """The choice that a text settles on, as it stands in ``choices``; None if on none."""
    marks = list(_MARK.finditer(text))
    for mark in reversed(marks[-10:]):
        if letter := _letter(text[mark.end() : mark.end() + _LONGEST].partition("\n")[0], choices):
            return letter
    lines = text.strip().splitlines()
    alone = lines and len(lines[-1]) <= _LONGEST and _patterns(choices)[1].match(lines[-1])
    return _letter(lines[-1], choices) if alone else None


def _truth(sample: Sample, answer_key: str, choices: str) -> str:
    value = sample.meta.get(answer_key)
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(choices):
            return choices[value]
        raise ValueError(f"the row's '{answer_key}' is {value}; expected an index from 0 to {len(choices) - 1}")
    said = read_truth(sample, answer_key)
    if letter := _letter(said, choices):
        return letter
    raise ValueError(f"the row's '{answer_key}' is {said[:80]!r}, none of the choices {choices} (set `choices`)")


def _letter(text: str, choices: str) -> str | None:
    """The choice that ``text`` begins with, decoration aside."""
    found = _patterns(choices)[0].match(text)
    if not found:
        return None
    letter, rest = found["letter"], text[found.end() :]
    if letter not in choices:  # a small letter, or the other way round
        if re.search(r"\w", rest):
            return None
        letter = letter.swapcase()
    if letter in "AI" and re.match(r"\s+[a-z]", rest):
        return None
    return None if _patterns(choices)[2].match(rest) else letter


@cache
def _patterns(choices: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """A decorated letter; a line that is one, or an option of a list; a second letter that goes with the first."""
    both = re.escape(choices) if not choices.isalpha() else choices.upper() + choices.lower()
    letter = rf"{_DECORATION}(?P<letter>[{both}])(?!['’]?\w)"
    alone = re.compile(rf"{_DECORATION}[{both}](?:[\W_]*$|[)\].:*]+\s)")
    second = re.compile(rf"[\s*)\]}}]*(?:,|/|&|\bor\b|\band\b)[\s*(\[{{]*(?:or\s+|and\s+)?[{choices}](?!['’]?\w)")
    return re.compile(letter), alone, second
