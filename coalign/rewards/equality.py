"""Whether two mathematical answers are equal: compared part by part, never by a prefix.

`notation.py` reads them. Expressions without further structure go to a comparer that the caller supplies, because
computer algebra belongs in a process that can be killed (`checker.py`). That process loads this file by its path, so it
needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from coalign.rewards.notation import (
    LONGEST,
    MathNode,
    are_assignments,
    is_assignment,
    read_answer,
    simplify_notation,
    write_key,
)
from coalign.rewards.quantity import GROUPED, is_rounded, read_quantity
from coalign.rewards.region import to_region

# (gold sides, predicted sides, relation): whether they say the same, where the relation is "", "=" or "<"
ExpressionComparer = Callable[[Sequence[str], Sequence[str], str], bool]


def is_same(gold: str, predicted: str, equal_expressions: ExpressionComparer) -> bool:
    """Whether two answers are equal. ``equal_expressions`` is called for those that have no structure of their own."""
    first, second = simplify_notation(gold), simplify_notation(predicted)
    if write_key(first) == write_key(second):
        return bool(first)
    if max(len(first), len(second)) > LONGEST:
        return False
    if _compare(read_answer(first), read_answer(second), equal_expressions):
        return True
    if (decimals := _read_comma(first, second)) is not None:
        return decimals
    if GROUPED.search(first):  # `100,200` is a number or a list
        one, other = (read_answer(GROUPED.sub(", ", text)) for text in (first, second))
        return _compare(one, other, equal_expressions)
    return False


def _read_comma(first: str, second: str) -> bool | None:
    """Compare `1,22` with 1.22: next to a number that is not whole, the comma of another is a decimal one."""
    for one, other in ((first, second), (second, first)):
        if re.fullmatch(r"-?(?:0|(?![0-9]{1,3},[0-9]{3}$)[0-9]+),[0-9]+", one):
            number = read_quantity(other)
            if number and ("." in other or number.value.denominator > 1):
                return Fraction(one.replace(",", ".")) == number.value
    return None


def _compare(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    if gold == predicted:
        return True
    kinds = {gold.kind, predicted.kind}
    if "near" in kinds and "relation" not in kinds:
        return _compare_near(gold, predicted, equal)
    if "choice" in kinds:
        return _compare_choices(gold, predicted, equal)
    if gold.kind == "list" and predicted.kind == "list":
        return _compare_lists(gold, predicted, equal)
    if is_assignment(gold) and is_assignment(predicted):
        return gold.parts[0].text == predicted.parts[0].text and _compare(gold.parts[1], predicted.parts[1], equal)
    if is_assignment(predicted) and gold.kind != "relation":
        return _compare(gold, predicted.parts[1], equal)
    if is_assignment(gold) and predicted.kind != "relation":
        return _compare(gold.parts[1], predicted, equal)
    if gold.kind == "list" and len(gold.parts) == 1:
        return _compare(gold.parts[0], predicted, equal)
    if predicted.kind == "list" and len(predicted.parts) == 1 and gold.kind != "number":
        return _compare(gold, predicted.parts[0], equal)
    if kinds & {"tuple", "union", "conditions"} and kinds & {"relation", "list", "conditions"}:
        one, other = to_region(gold), to_region(predicted)
        if one and other and (one, other) != (gold, predicted):
            return _compare(one, other, equal)
        if "conditions" in kinds:
            return not one and not other and len(kinds) == 1 and _match_all(gold.parts, predicted.parts, equal)
    if kinds == {"congruence"}:
        return _compare_congruences(gold, predicted, equal)
    if kinds == {"matrix", "tuple"}:  # a vector
        one, other = _to_tuple(gold), _to_tuple(predicted)
        return one.kind == other.kind and _compare(one, other, equal)
    if kinds == {"list", "tuple"}:  # a tuple without its brackets
        brackets = gold.text + predicted.text
        return brackets == "()" and _compare_in_order(gold.parts, predicted.parts, equal)
    if gold.kind == "relation" and predicted.kind == "relation":
        return _compare_relations(gold, predicted, equal)
    if gold.kind == "number" and predicted.kind == "number":
        return _is_equal_number(gold, predicted) and _agree(gold.unit, predicted.unit)
    number, other = (gold, predicted) if gold.kind == "number" else (predicted, gold)
    if kinds == {"number", "expression"} and number.unit and not other.unit:  # `5 m`, where metres are asked for
        one, other = (_read_letter_unit(node) for node in (gold, predicted))
        return one.unit == other.unit and _compare(one, other, equal)
    if gold.kind == "number":  # `2+2` does not pay for 4
        return False
    if not _agree(gold.unit, predicted.unit):
        return False
    if gold.kind != predicted.kind:
        return kinds <= {"expression", "number", "words"} and equal([gold.text], [predicted.text], "")
    match gold.kind:
        case "tuple" | "matrix":
            return gold.text == predicted.text and _compare_in_order(gold.parts, predicted.parts, equal)
        case "union" | "piecewise":
            return _match_all(gold.parts, predicted.parts, equal)
        case "ratio":
            return _compare_ratios(gold, predicted, equal)
        case "base" | "words":
            return gold.text == predicted.text
    return equal([gold.text], [predicted.text], "")


def _read_letter_unit(node: MathNode) -> MathNode:
    found = re.fullmatch(r"(.*[0-9.}])\s*([A-Za-z])((?:\^[23])?)", node.text)
    return read_answer(rf"{found[1]}\text{{{found[2]}}}{found[3]}") if found else node


def _compare_lists(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    named = [are_assignments(node.parts) for node in (gold, predicted)]
    if any(named) and not all(named):  # values without their names mean something in the order of the names only
        return _compare_in_order(gold.parts, predicted.parts, equal)
    return _match_all(gold.parts, predicted.parts, equal)


def _match_all(gold: Sequence[MathNode], predicted: Sequence[MathNode], equal: ExpressionComparer) -> bool:
    """Whether each part of one equals a part of its own of the other. A part that is said twice is said once."""
    gold, left = list(dict.fromkeys(gold)), list(dict.fromkeys(predicted))
    if len(gold) != len(left):
        return False
    for one in gold:
        keys = [other for other in left if other == one]
        partner = keys[0] if keys else next((other for other in left if _compare(one, other, equal)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _compare_in_order(gold: Sequence[MathNode], predicted: Sequence[MathNode], equal: ExpressionComparer) -> bool:
    return len(gold) == len(predicted) and all(_compare(*pair, equal) for pair in zip(gold, predicted, strict=True))


def _compare_relations(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    if gold.text == predicted.text and _compare_in_order(gold.parts, predicted.parts, equal):
        return True
    if gold.text != predicted.text or len(gold.text) > 1:
        return False
    if gold.text in "=≠" and _compare_in_order(gold.parts, predicted.parts[::-1], equal):
        return True
    first, second = ([part.text for part in node.parts] for node in (gold, predicted))
    return equal(first, second, "=" if gold.text in "=≠" else "<")


def _compare_ratios(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    first, second = ([part.value for part in node.parts if part.value] for node in (gold, predicted))
    if any(part.unit for part in (*gold.parts, *predicted.parts)):  # `3:15 pm`
        return _compare_in_order(gold.parts, predicted.parts, equal)
    if len(first) == len(second) == len(gold.parts) == len(predicted.parts):
        return all(one * second[0] == other * first[0] for one, other in zip(first, second, strict=True))
    return _compare_in_order(gold.parts, predicted.parts, equal)


def _compare_congruences(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """`n ≡ 3` and `10` modulo 7 are equal; two names must be the same."""
    if gold.value != predicted.value or (gold.text and predicted.text and gold.text != predicted.text):
        return False
    return _match_all(_list_residues(gold), _list_residues(predicted), equal)


def _list_residues(node: MathNode) -> list[MathNode]:
    modulus = node.value or 1
    return [part if part.value is None else replace(part, text="", value=part.value % modulus) for part in node.parts]


def _compare_near(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """What is near a value is not an exact one: only a truth that is near, too, or a decimal is paid."""
    one, other = (node.parts[0] if node.kind == "near" else node for node in (gold, predicted))
    if gold.kind != "near" and ((gold.value is not None and gold.value.denominator == 1) or "." not in other.text):
        return False
    return _compare(one, other, equal)


def _compare_choices(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """`(C) 12` is C, and is 12; both count where both are said."""
    letters = [node.text for node in (gold, predicted) if node.kind == "choice" or re.fullmatch("[A-J]", node.text)]
    if len(letters) == 2 and letters[0] != letters[1]:
        return False
    one, other = (node.parts[0] if node.kind == "choice" else node for node in (gold, predicted))
    return (len(letters) == 2 and gold.kind != predicted.kind) or _compare(one, other, equal)


def _to_tuple(node: MathNode) -> MathNode:
    """A matrix of one column or one row as a tuple."""
    rows = [row.parts for row in node.parts]
    if node.kind != "matrix" or node.text or not (len(rows) == 1 or all(len(row) == 1 for row in rows)):
        return node
    return MathNode("tuple", "()", tuple(part for row in rows for part in row))


def _is_equal_number(gold: MathNode, predicted: MathNode) -> bool:
    """Exact equality, or a decimal of six digits or more that rounds a value without end."""
    assert gold.value is not None and predicted.value is not None
    if gold.value == predicted.value:
        return True
    exact, rounded = (gold, predicted) if "." in predicted.text else (predicted, gold)
    assert exact.value is not None and rounded.value is not None
    digits = re.search(r"\.([0-9]+)", rounded.text)
    if "." in exact.text or not digits or re.search(r"[/\\]", rounded.text):
        return False
    return is_rounded(exact.value, rounded.text)


def _agree(first: str, second: str) -> bool:
    """Two units that are both known must be the same; others say nothing."""
    return first == second or not first or not second or "unit" in (first[:4], second[:4])
