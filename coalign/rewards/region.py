"""Intervals and unions that relations of one variable say: `x < 1 or x > 5`, `x > 4 and x ≤ 9`, `x ≠ 0`.

The checker's process loads this file by its path, so it needs only the standard library (`checks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from coalign.rewards.notation import HIGHEST, LOWEST, MathNode, is_name


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
    if node.kind in ("tuple", "union") or (node.kind == "list" and not node.parts):
        return node
    names = {part.text for relation in _list_relations(node) for part in relation.parts if is_name(part.text)}
    if len(names) > 1 and node.kind != "relation":
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
