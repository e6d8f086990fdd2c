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
    if node.type == "relation" and node.text == "∈":
        return to_region(node.children[1])
    if node.type in ("tuple", "union") or (node.type == "list" and not node.children):
        return node
    if len(list_names(node)) > 1 and node.type != "relation":
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
    texts = [side.text for relation in _list_relations(node) for side in relation.children]
    moduli = [_MODULUS.fullmatch(text) for text in texts]
    names = {modulus[2] or modulus[8] for modulus in moduli if modulus}
    return names | {text for text, modulus in zip(texts, moduli, strict=True) if not modulus and is_name(text)}


def _list_relations(node: MathNode) -> list[MathNode]:
    if node.type not in ("list", "conditions"):
        return [node]
    return [relation for child in node.children for relation in _list_relations(child)]


def _list_intervals(node: MathNode) -> list[_Interval] | None:
    """The intervals that a relation or a list of them leaves; None if one of them says no interval."""
    if node.type == "relation":
        return _read_relation(node)
    if node.type not in ("list", "conditions") or not node.children or node.text == "{}":
        return None
    sets: list[list[_Interval]] = []
    for relation in node.children:
        intervals = _list_intervals(relation)
        if intervals is None or (
            node.type == "list" and len(node.children) > 1 and (relation.type, relation.text) == ("relation", "≠")
        ):
            return None  # `x ≠ 1 or x ≠ 2` is true of every number, and hardly meant
        sets.append(intervals)
    alternatives = [interval for intervals in sets for interval in intervals]
    if node.type == "list":
        return alternatives
    common = sets[0]
    for intervals in sets[1:]:
        common = [both for one in common for two in intervals if (both := _intersect(one, two, node.text != ","))]
    # A comma says "and" where that leaves something, else "or".
    return alternatives if not common and node.text == "," else common


def _read_relation(relation: MathNode) -> list[_Interval] | None:
    """`a < x ≤ b` as `(a, b]`, `x ≠ a` as what is below and above it."""
    low, sign, high = None, relation.text, None
    if set(sign) <= set("<≤") and any(_MODULUS.fullmatch(side.text) for side in relation.children):
        return _read_modulus(relation)
    names = [is_name(side.text) for side in relation.children]
    if sign == "≠" and names == [True, False]:
        return [_Interval(*ends) for ends in pairwise((LOWEST, relation.children[1], HIGHEST))]
    if not set(sign) <= set("<≤"):
        return None
    match len(relation.children), names:
        case 3, [_, True, _]:
            low, high = relation.children[0], relation.children[2]
        case 2, [True, False]:
            low, high, sign = LOWEST, relation.children[1], "<" + sign
        case 2, [False, True]:
            low, high, sign = relation.children[0], HIGHEST, sign + "<"
    if low is None or high is None:
        return None
    return [_Interval(low, high, ("(" if sign[0] == "<" else "[") + (")" if sign[1] == "<" else "]"))]


_TERM = r"(?:[0-9]+(?:\.[0-9]+)?|\\frac\{[0-9]+\}\{[1-9][0-9]*\})"
_MODULUS = re.compile(  # `|2x - 3|`, `|3 - x|`; the variable z is complex
    rf"\|\s*(?:(-?{_TERM}?)\s*([a-y])\s*(?:([+-])\s*({_TERM}))?|(-?{_TERM})\s*([+-])\s*({_TERM}?)([a-y]))\s*\|"
)


def has_modulus(node: MathNode) -> bool:
    """Whether an answer is a relation of a modulus such as `|x - 1|`."""
    return node.type == "relation" and any(_MODULUS.fullmatch(side.text) for side in node.children)


def _read_modulus(relation: MathNode) -> list[_Interval] | None:
    """`|x| < a` as (-a, a), `a ≤ |x - b|` as what is up to b - a and from b + a on."""
    positions = [i for i, side in enumerate(relation.children) if _MODULUS.fullmatch(side.text)]
    if positions not in ([0], [1]) or len(relation.children) > positions[0] + 2:
        return None
    (position,) = positions
    modulus = relation.children[position]
    ends = [_solve_modulus(modulus.text, side) for i, side in enumerate(relation.children) if i != position]
    if None in ends:
        return None
    low, high = ends[0] if position else None, ends[-1] if position + 1 < len(relation.children) else None
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
    first, _, sign, second, third, leading_sign, fourth, _ = linear.groups()
    if third is not None:
        first, sign, second = leading_sign + fourth, "+", third
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


def _intersect(first: _Interval, second: _Interval, must_meet: bool) -> _Interval | None:
    """What two intervals share; None if nothing. ``must_meet``: ends of an unknown order are in the right one."""
    lower = _order(first.low, second.low)
    low = first.low if lower >= 0 else second.low
    opening = min(a.brackets[0] for a in (first, second) if a.low == low or not lower)  # "(" comes before "["
    upper = _order(first.high, second.high)
    high = first.high if upper <= 0 else second.high
    closing = min(a.brackets[1] for a in (first, second) if a.high == high or not upper)
    try:
        width = _order(high, low)
    except _OrderUnknown:
        if not must_meet:
            raise
        width = 1
    return _Interval(low, high, opening + closing) if width > 0 or (not width and opening + closing == "[]") else None


def _order(first: MathNode, second: MathNode) -> int:
    """1 if one end is above the other, -1 if below, 0 if they are equal. Raises _OrderUnknown."""
    if first == second:
        return 0
    for node, sign in ((first, 1), (second, -1)):
        if node in (LOWEST, HIGHEST):
            return sign if node == HIGHEST else -sign
    if first.value is None or second.value is None:
        raise _OrderUnknown
    return (first.value > second.value) - (first.value < second.value)
