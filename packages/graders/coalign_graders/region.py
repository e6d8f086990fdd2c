"""Intervals and unions that relations of one variable say: `x < 1 or x > 5`, `x > 4 and x ≤ 9`, `x ≠ 0`, `|x| > 1`.

The checker's process loads this file by its path, so it needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from coalign_graders.notation import HIGHEST, LOWEST, MathNode, is_name


@dataclass(frozen=True)
class _Interval:
    """What lies between two ends; an end belongs to it if its bracket is square."""

    low: MathNode
    high: MathNode
    brackets: str = "()"

    def to_node(self) -> MathNode:
        return MathNode("tuple", self.brackets, (self.low, self.high))


class _OrderUnknown(Exception):
    """Two ends are expressions, of which nobody knows here which is larger."""


def to_region(node: MathNode) -> MathNode | None:
    """The interval, the union or the empty list that relations of one variable say; None for others."""
    if node.kind == "relation" and node.text == "∈":
        return to_region(node.parts[1])
    if node.kind in ("tuple", "union") or (node.kind == "list" and not node.parts):
        return node
    if len(list_names(node)) > 1 and node.kind != "relation":
        return None
    try:
        intervals = _list_intervals(node)
    except _OrderUnknown:
        return None
    if not intervals:
        return None if intervals is None else MathNode("list", "")
    if len(intervals) == 1:
        return intervals[0].to_node()
    return MathNode("union", "", tuple(interval.to_node() for interval in intervals))


def list_names(node: MathNode) -> set[str]:
    """The variables of an answer's relations."""
    texts = [part.text for relation in _list_relations(node) for part in relation.parts]
    moduli = [_MODULUS.fullmatch(text) for text in texts]
    names = {modulus[2] or modulus[8] for modulus in moduli if modulus}
    return names | {text for text, modulus in zip(texts, moduli, strict=True) if not modulus and is_name(text)}


def _list_relations(node: MathNode) -> list[MathNode]:
    if node.kind not in ("list", "conditions"):
        return [node]
    return [relation for part in node.parts for relation in _list_relations(part)]


def _list_intervals(node: MathNode) -> list[_Interval] | None:
    """The intervals that a relation or a list of them leaves; None if one of them says no interval."""
    if node.kind == "relation":
        return _read_relation(node)
    if node.kind not in ("list", "conditions") or not node.parts or node.text == "{}":
        return None
    sets: list[list[_Interval]] = []
    for part in node.parts:
        intervals = _list_intervals(part)
        if intervals is None or (node.kind == "list" and len(node.parts) > 1 and _is_hole(part)):
            return None  # `x ≠ 1 or x ≠ 2` is true of every number, and hardly meant
        sets.append(intervals)
    alternatives = [interval for intervals in sets for interval in intervals]
    if node.kind == "list":
        return alternatives
    common = sets[0]
    for intervals in sets[1:]:
        common = [both for one in common for other in intervals if (both := _intersect(one, other, node.text != ","))]
    # A comma says "and" where that leaves something, else "or".
    return alternatives if not common and node.text == "," else common


def _read_relation(relation: MathNode) -> list[_Interval] | None:
    """`a < x ≤ b` as `(a, b]`, `x ≠ a` as what is below and above it."""
    low, sign, high = None, relation.text, None
    if set(sign) <= set("<≤") and any(_MODULUS.fullmatch(part.text) for part in relation.parts):
        return _read_modulus(relation)
    names = [is_name(part.text) for part in relation.parts]
    if sign == "≠" and names == [True, False]:
        return [_Interval(*ends) for ends in pairwise((LOWEST, relation.parts[1], HIGHEST))]
    if not set(sign) <= set("<≤"):
        return None
    match len(relation.parts), names:
        case 3, [_, True, _]:
            low, high = relation.parts[0], relation.parts[2]
        case 2, [True, False]:
            low, high, sign = LOWEST, relation.parts[1], "<" + sign
        case 2, [False, True]:
            low, high, sign = relation.parts[0], HIGHEST, sign + "<"
    if low is None or high is None:
        return None
    return [_Interval(low, high, ("(" if sign[0] == "<" else "[") + (")" if sign[1] == "<" else "]"))]


_TERM = r"(?:[0-9]+(?:\.[0-9]+)?|\\frac\{[0-9]+\}\{[1-9][0-9]*\})"
_MODULUS = re.compile(  # `|2x - 3|`, `|3 - x|`; the variable z is complex
    rf"\|\s*(?:(-?{_TERM}?)\s*([a-y])\s*(?:([+-])\s*({_TERM}))?|(-?{_TERM})\s*([+-])\s*({_TERM}?)([a-y]))\s*\|"
)


def has_modulus(node: MathNode) -> bool:
    """Whether an answer is a relation of a modulus such as `|x - 1|`."""
    return node.kind == "relation" and any(_MODULUS.fullmatch(part.text) for part in node.parts)


def _read_modulus(relation: MathNode) -> list[_Interval] | None:
    """`|x| < a` as (-a, a), `a ≤ |x - b|` as what is up to b - a and from b + a on."""
    places = [i for i, part in enumerate(relation.parts) if _MODULUS.fullmatch(part.text)]
    if places not in ([0], [1]) or len(relation.parts) > places[0] + 2:
        return None
    (place,) = places
    ends = [_solve_modulus(relation.parts[place].text, part) for i, part in enumerate(relation.parts) if i != place]
    if None in ends:
        return None
    low, high = ends[0] if place else None, ends[-1] if place + 1 < len(relation.parts) else None
    inner, outer = ("[]" if sign == "≤" else "()" for sign in (relation.text[0], relation.text[-1]))
    if low is None:
        return [_Interval(*high, outer)] if high else None
    below, above = high or (LOWEST, HIGHEST)
    outer = outer if high else "()"
    return [_Interval(below, low[0], outer[0] + inner[1]), _Interval(low[1], above, inner[0] + outer[1])]


def _solve_modulus(modulus: str, end: MathNode) -> tuple[MathNode, MathNode] | None:
    """Where a modulus equals ``end``, which is not negative; None if that is not known here."""
    linear = _MODULUS.fullmatch(modulus)
    assert linear is not None
    first, _, sign, second, third, other_sign, fourth, _ = linear.groups()
    if third is not None:
        first, sign, second = other_sign + fourth, "+", third
    slope = _read_factor(first.replace(" ", ""))
    offset = _read_factor((sign or "+") + (second or "0"))
    if end.value is None and (slope, offset) == (1, 0) and "-" not in end.text:
        return MathNode("expression", f"-({end.text})"), end
    if end.value is None or end.value < 0 or not slope:
        return None
    low, high = sorted((value - offset) / slope for value in (-end.value, end.value))
    return MathNode("number", str(low), value=low), MathNode("number", str(high), value=high)


def _read_factor(text: str) -> Fraction:
    r"""A number such as `-\frac{1}{2}` before a variable; 1 where only its sign is written."""
    text = re.sub(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)
    return Fraction(text + "1" if text in ("", "+", "-") else text)


def _is_hole(node: MathNode) -> bool:
    return node.kind == "relation" and node.text == "≠"


def _intersect(one: _Interval, other: _Interval, must_meet: bool) -> _Interval | None:
    """What two intervals share; None if nothing. ``must_meet``: ends of an unknown order are in the right one."""
    lower = _order(one.low, other.low)
    low = one.low if lower >= 0 else other.low
    opening = min(a.brackets[0] for a in (one, other) if a.low == low or not lower)  # "(" comes before "["
    upper = _order(one.high, other.high)
    high = one.high if upper <= 0 else other.high
    closing = min(a.brackets[1] for a in (one, other) if a.high == high or not upper)
    try:
        width = _order(high, low)
    except _OrderUnknown:
        if not must_meet:
            raise
        width = 1
    return _Interval(low, high, opening + closing) if width > 0 or (not width and opening + closing == "[]") else None


def _order(one: MathNode, other: MathNode) -> int:
    """1 if one end is above the other, -1 if below, 0 if they are equal. Raises _OrderUnknown."""
    if one == other:
        return 0
    for node, sign in ((one, 1), (other, -1)):
        if node in (LOWEST, HIGHEST):
            return sign if node == HIGHEST else -sign
    if one.value is None or other.value is None:
        raise _OrderUnknown
    return (one.value > other.value) - (one.value < other.value)
