"""The math reward: reads the final answer out of a worked solution and compares it with the ground truth.

It does not grade the reasoning, and it does not compute: `2+2` is not accepted for 4, so a model earns nothing by
restating the problem. Numbers are compared exactly (as fractions); other answers are left to math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction

from coalign.rewards.rules import read_truth
from coalign.rewards.symbolic import equivalent
from coalign.types import Sample

# Longer answers and more marks are nonsense, and reading them would take quadratic time.
_LONGEST = 400  # characters of an answer
_MARKS = 10  # of an answer, from the last one back
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-−]\$?)?{_DECIMAL}(?:/{_DECIMAL})?")
_FRACTION = re.compile(rf"(-?)\s*(?:({_DIGITS})\s+)?({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_UNIT = re.compile(r"(?:\s*%|\s*°)?\s*[^\W\d_]*(?:\s+[^\W\d_]+){0,3}\s*")
_STRICT_MARK = re.compile(r"####|\\boxed\s*\{")
_PHRASE = r"\b(?:the|final|correct)\s+answer(?:\s+is\b\s*:?|\s*[:=])|^[^\w\n]*A(?:nswer)?\s*:"
_MARK = re.compile(rf"{_STRICT_MARK.pattern}|(?im:{_PHRASE})")


def math(sample: Sample, *, answer_key: str = "answer", strict: bool = False) -> float:
    """1.0 if the final answer of the response equals that of ``row[answer_key]``, else 0.0.

    Ground truth: what follows ``####`` (GSM8K), is in ``\\boxed{}`` (MATH), or follows "the answer is" / "A:"; else the
    whole value. Prediction: the last such mark in the response (after ``</think>``, if any), else the last number.
    ``strict`` accepts only ``####`` and ``\\boxed{}`` in the response. Thousands commas, currency signs, units and
    percent signs are ignored, so 50% equals 50 and not 0.5. A truth that is a number needs a prediction that is the
    same number. Other truths (roots, intervals, polynomials) match as text or by math-verify.

    Raises KeyError or ValueError for a row without a ground truth, ModuleNotFoundError if math-verify is needed and
    missing.
    """
    gold = read_truth(sample, answer_key)
    gold = final_answer(gold) or gold
    predicted = final_answer(sample.response.rpartition("</think>")[2], strict=strict, last_number=not strict)
    return float(predicted is not None and same_answer(gold, predicted))


def final_answer(text: str, *, strict: bool = False, last_number: bool = False) -> str | None:
    """The text after the last answer mark; None if there is no mark.

    ``last_number`` falls back on the last number of the text; only ``####`` and ``\\boxed{}`` are ``strict`` marks.
    """
    marks = list((_STRICT_MARK if strict else _MARK).finditer(text))
    for mark in reversed(marks[-_MARKS:]):  # a mark with nothing behind it (a truncated response) does not count
        behind = text[mark.end() :]
        answer = (
            _read_braces(behind[:_LONGEST]) if mark.group().endswith("{") else behind.strip().split("\n")[0].strip()
        )
        if answer:
            return answer
    numbers = _NUMBER.findall(text) if last_number else []
    return numbers[-1] if numbers else None


def same_answer(gold: str, predicted: str) -> bool:
    """Whether two final answers are equal: as numbers, as text, or, if the truth is an expression, symbolically."""
    if (expected := number(gold)) is not None:
        return expected == number(predicted)
    if _plain(gold) == _plain(predicted):
        return True
    expression = re.search(r"[0-9\\^_=+*/(\[{<>-]", gold)
    return expression is not None and len(predicted) <= _LONGEST and equivalent(gold, predicted)


def number(answer: str) -> Fraction | None:
    """The number that an answer states; None for none, or for an expression (`2+2`, `\\sqrt{2}`).

    `1,000`, `$5.00`, `50\\%`, `\\frac{3}{4}`, `1 1/2`, `18 dollars`, `x = 7`, `She makes $18 a day` all state one; of
    several in running text it is the first.
    """
    text = _plain_number(answer)
    if len(text) > _LONGEST:
        return None
    text = text.rpartition("=")[2].strip()
    if (whole := _FRACTION.match(text)) and _UNIT.fullmatch(text, whole.end()):
        return _fraction(whole)
    if re.search(r"[\\^{}()\[\]*+]|[0-9]\s*[-/]\s*[^\W_]", text):
        return None
    found = _NUMBER.search(text)
    stated = _FRACTION.match(found.group()) if found else None
    return _fraction(stated) if stated else None


def _fraction(match: re.Match[str]) -> Fraction | None:
    sign, whole, top, bottom = (part and part.replace(",", "") for part in match.groups())
    if bottom is not None and Fraction(bottom) == 0:
        return None
    value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)
    return -value if sign else value


def _plain_number(answer: str) -> str:
    """An answer with its number notations simplified to `-1,234.5/6`."""
    text = _plain(answer).replace("{,}", ",").replace("−", "-")
    text = re.sub(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))", r" \1\2/\3\4 ", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    return re.sub(r"[$€£¥]|\\[!,;: ]", "", text).replace("- ", "-").strip(" ~*").rstrip(".")


def _plain(answer: str) -> str:
    text = (
        re.sub(r"\\(?:left|right|displaystyle)\b|\*\*|\\[()\[\]]", "", answer).replace("\\%", "%").replace("\\$", "$")
    )
    return " ".join(text.strip(" \t\n$").rstrip("$. ").lower().split())


def _read_braces(text: str) -> str | None:
    """The text before the closing brace of a group that is already open; None if it never closes."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i].strip()
    return None
