"""The math reward: reads the final answer out of a worked solution and compares it with the ground truth.

It does not grade the reasoning, and it does not compute: `2+2` is not accepted for 4, so a model earns nothing by
restating the problem. `equality.py` says what makes two answers equal.
"""

from __future__ import annotations

import asyncio
import re

from coalign_graders.answers import read_truths, remove_thoughts
from coalign_graders.checker import AT_ONCE, check
from coalign_graders.equality import is_same
from coalign_graders.layout import LONGEST, spell_digits
from coalign_graders.sample import GradedSample

_SHORT = 100  # characters that are read without a process of their own
_MARKS = 10  # that are read, from the last one back: more are nonsense
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{\\$]))")
_PHRASE = r"\b(?:the|final|correct)\s+answer(?:\s+is\b\s*:?|\s*[:=])|^[^\w\n]{0,20}A(?:nswer)?\s*:"
_MARK = re.compile(rf"####|<answer>|(?im:{_PHRASE})")
# Between two boxes that are one answer: `\boxed{1} and \boxed{2}`.
_BETWEEN = re.compile(
    r"(?:[\s$.,;]|\\[()\[\],; ]|\\q?quad|\band\b|\bor\b|\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}){0,20}"
)
# What is said of an answer, and is none: "the answer is correct".
_VERDICT = re.compile(
    r"[\W_]*(?:\w+ly\s+)?(?:correct|right|wrong|incorrect|not|unclear|unknown|as\s+follows|below|above|therefore|given|"
    r"found|obtained|the\s+same|consistent|verified|in\s+the)\b",
    re.IGNORECASE,
)
# Where the prose after an answer begins: "5, because …", "5. This …".
_PROSE = re.compile(
    r"(?<!\bno)[.!?](?=\s|$)|[,;:]?\s+(?:because|since|which|as|so|where|when|with|for|if|by|after|that)\s|"
    r",\s+(?!and\b|or\b)(?=[a-z]{2,}\s)|\s+\((?=[a-z]{3})",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)}])[-−]\s?\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}\b)?"
    r"(?:/[0-9]+(?:,[0-9]{3})*)?|\.[0-9]+"
)
_BEFORE = re.compile(
    r"(?:[\^_√±<>≤≥≠≈]|\\(?:pm|cdot|times|sqrt|frac|[lg](?:e|eq|t)|neq?|approx)|[\w)}]\s?[-+*/·×]|[+/]|(?<!\*)\*)\s?"
    r"[{(]?\s?$|\bnot\s+[$(]?$"
)  # an expression,
_BEHIND = re.compile(
    r"\s?(?:[\^_·×!]|\*(?!\*)|[+/](?=\s?[\w\\(])|-\s?[0-9\\(]|\\(?:pi|sqrt|cdot|times|frac)|[)}]\s?[\^_])"
)


async def math(sample: GradedSample, *, answer_key: str = "answer", strict: bool = False) -> float:
    """1.0 if the final answer of the response equals that of ``row[answer_key]``, else 0.0.

    Ground truth: what is in ``\\boxed{}`` (MATH), follows ``####`` (GSM8K), or follows "the answer is" / "A:"; else the
    whole value. Of a list of truths any is right. Prediction, after ``</think>`` if there is one:

    1. the last ``\\boxed{}`` that closes, with those that are joined to it ("and", a comma);
    2. else what follows the last mark that has an answer: ``####``, ``<answer>``, "the answer is", "Answer:", "A:";
    3. else the last number, if it is no part of an expression and no box was left open.

    ``strict`` accepts only ``\\boxed{}`` and ``####`` in the response. A truth that is a number needs a prediction that
    is the same number: thousands separators, currency signs and units are ignored (but centimetres are not metres, and
    50% equals 50 and not 0.5). Lists and sets have no order, tuples and intervals have; expressions are compared by
    math-verify. What takes more than five seconds to compare is wrong.

    Raises KeyError or ValueError for a row without a ground truth, ModuleNotFoundError if math-verify is needed and
    missing.
    """
    truths = read_truths(sample, answer_key)
    said = remove_thoughts(sample.response, sample.prompt)
    predicted = find_answer(said, strict=strict, last_number=not strict)
    if predicted is None:
        return 0.0
    for truth in truths:
        gold = find_answer(truth) or truth
        verdict = _compare_short(gold, predicted)
        if verdict or (verdict is None and await asyncio.to_thread(check, "math", gold, predicted)):
            return 1.0
    return 0.0


math.at_once = AT_ONCE  # so that waiting for a process is no part of a call's time


def find_answer(text: str, *, strict: bool = False, last_number: bool = False) -> str | None:
    """The final answer of a text; None if it has none.

    ``last_number`` falls back on the last number of the text; only ``####`` and ``\\boxed{}`` are ``strict`` marks.
    """
    text = spell_digits(text)
    boxed, opened = _find_boxes(text)
    if boxed:
        return boxed
    text = text if opened is None else text[:opened]
    marks = [mark for mark in _MARK.finditer(text) if not strict or mark[0] == "####"]
    for mark in reversed(marks[-_MARKS:]):  # a mark with nothing behind it (a truncated response) does not count
        behind = text[mark.end() : mark.end() + 8 * LONGEST].lstrip()
        if mark[0] == "<answer>":
            answer = behind.partition("</answer>")[0].strip()
        else:
            answer = behind.partition("\n")[0].strip(" \t*_`")
            if mark[0] != "####":
                answer = "" if _VERDICT.match(answer) else _cut_prose(answer)
        if re.search(r"\w", answer):
            return answer
    return _find_number(text) if last_number and opened is None else None


def is_same_answer(gold: str, predicted: str) -> bool:
    """Whether two final answers are equal; False if five seconds do not decide it. Waits for the checker's process."""
    verdict = _compare_short(gold, predicted)
    return check("math", gold, predicted) if verdict is None else verdict


class _AlgebraNeeded(Exception):
    """The comparison has come to an expression."""


def _compare_short(gold: str, predicted: str) -> bool | None:
    """Compare answers that are short and hold no expression; None for others, which a process of their own reads."""

    def refuse(*_: object) -> bool:
        raise _AlgebraNeeded

    if max(len(gold), len(predicted)) > _SHORT:
        return None
    try:
        return is_same(gold, predicted, refuse)
    except _AlgebraNeeded:
        return None


def _find_boxes(text: str) -> tuple[str | None, int | None]:
    """The content of the last closed boxes, joined by commas, and where an open or empty one behind them begins."""
    contents: list[str] = []
    opened, following = None, len(text)
    for box in reversed(list(_BOX.finditer(text))[-_MARKS:]):
        begin = box.end()
        if box[0].endswith("{"):
            end = _find_brace(text, begin)
        else:  # `\boxed 5`
            end = begin + len(text[begin : begin + LONGEST].split("$")[0].split(maxsplit=1)[0])
        if end is None:
            if not contents:
                opened = following = box.start()
            continue
        if end > following:  # around a box that is read already
            continue
        if contents and not _BETWEEN.fullmatch(text[end + 1 : following][:_SHORT]):
            break
        if content := text[begin:end].strip():
            contents.insert(0, content)
        elif not contents:
            opened = box.start()
        following = box.start()
    return ", ".join(dict.fromkeys(contents)) or None, opened


def _find_brace(text: str, begin: int) -> int | None:
    """Where the group that is open at ``begin`` closes; None if it does not, or is longer than an answer."""
    depth = 1
    for i in range(begin, min(len(text), begin + 8 * LONGEST)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    return None


def _cut_prose(answer: str) -> str:
    """An answer without the sentence that goes on behind it."""
    answer = " ".join(answer.split())
    prose = _PROSE.search(answer)
    return answer[: prose.start()] if prose else answer


def _find_number(text: str) -> str | None:
    """The last number of a text; None if it is part of an expression."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    preceding, following = text[max(0, last.start() - _SHORT) : last.start()], text[last.end() : last.end() + _SHORT]
    return None if _BEFORE.search(preceding) or _BEHIND.match(following) else last[0]
