"""The multiple-choice reward: reads the letter that a response chooses."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated

from pydantic import Field

from coalign_graders.answers import read_truths, remove_thoughts
from coalign_graders.sample import GradedSample

_DECORATION = r"[\s*_$`\"'(\[{<]*(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{\s*)*[\s*_$`\"'(\[{<]*"
_SAYS = r"[*_]{0,3}(?:\s+is\b[*_]{0,3}\s*:?|\s*[:=])"  # bold may end on either side of the colon
_MARK = re.compile(
    rf"####|\\boxed(?=\s*\{{)|\banswer{_SAYS}|\b(?:correct|right|best|final)\s+(?:option|choice){_SAYS}",
    re.IGNORECASE,
)
_LONGEST = 200  # characters read after a mark


def multiple_choice(
    sample: GradedSample, *, answer_key: str = "answer", choices: Annotated[str, Field(min_length=2)] = "ABCDE"
) -> float:
    """1.0 if the response chooses the letter in ``row[answer_key]``, else 0.0.

    The truth is one of ``choices`` (`B`, `(B)`, `B. Paris`), a list of such, any of which is right, or an index from 0
    if the row has an integer. The response's letter is read after `</think>`:

    1. the letter right after the last mark that has one: `####`, `\\boxed{}`, "answer is", "answer:", "correct (right,
       best, final) option is" or "choice is", with or without brackets, quotes, bold;
    2. without such a mark, a last line that holds only a letter (`B`, `(b)`, `**B.**`), or that begins with a letter
       and a bracket or full stop (`B) Paris`);
    3. else none. A letter does not count if more letters follow ("A or B", "A, C"), if it is a word ("A train"), or if
       it only occurs somewhere in the text.

    Small letters count if only punctuation follows. Raises ValueError for a truth that is none of the choices.
    """
    expected = _read_letters(sample, answer_key, choices)
    return float(find_choice(remove_thoughts(sample.response, sample.prompt), choices) in expected)


def find_choice(text: str, choices: str) -> str | None:
    """The letter that a text chooses, spelled as in ``choices``; None if it chooses none."""
    marks = list(_MARK.finditer(text))
    for mark in reversed(marks[-10:]):
        if letter := _letter(text[mark.end() : mark.end() + _LONGEST].partition("\n")[0], choices):
            return letter
    lines = text.strip().splitlines()
    alone = lines and len(lines[-1]) <= _LONGEST and _patterns(choices)[1].match(lines[-1])
    return _letter(lines[-1], choices) if alone else None


def _read_letters(sample: GradedSample, answer_key: str, choices: str) -> list[str]:
    value = sample.meta.get(answer_key)
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(choices):
            return [choices[value]]
        raise ValueError(f"the row's '{answer_key}' is {value}; expected an index from 0 to {len(choices) - 1}")
    letters = []
    for truth in read_truths(sample, answer_key):
        if not (letter := _letter(truth, choices)):
            raise ValueError(
                f"the row's '{answer_key}' is {truth[:80]!r}, none of the choices {choices} (set `choices`)"
            )
        letters.append(letter)
    return letters


def _letter(text: str, choices: str) -> str | None:
    """The choice that ``text`` begins with, after brackets and markup."""
    match = _patterns(choices)[0].match(text)
    if not match:
        return None
    letter, rest = match["letter"], text[match.end() :]
    if letter not in choices:  # a small letter, or the other way round
        if re.search(r"\w", rest):
            return None
        letter = letter.swapcase()
    if letter in "AI" and re.match(r"\s+[a-z]", rest):
        return None
    return None if _patterns(choices)[2].match(rest) else letter


@cache
def _patterns(choices: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Patterns of a letter with its markup, a line that is a letter or an option, and a second letter."""
    both = re.escape(choices) if not choices.isalpha() else choices.upper() + choices.lower()
    letter = rf"{_DECORATION}(?P<letter>[{both}])(?!['’]?\w)"
    alone = re.compile(rf"{_DECORATION}[{both}](?:[\W_]*$|[)\].:*]+\s)")
    second = re.compile(rf"[\s*)\]}}]*(?:,|/|&|\bor\b|\band\b)[\s*(\[{{]*(?:or\s+|and\s+)?[{choices}](?!['’]?\w)")
    return re.compile(letter), alone, second
