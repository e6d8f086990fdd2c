"""Whether two mathematical answers are equal: compared node by node, never by a prefix.

`notation.py` reads them. Expressions without further structure go to a comparer that the caller supplies, because
computer algebra belongs in a process that can be killed (`checker.py`). That process loads this file by its path, so it
needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from coalign_graders.layout import LONGEST, simplify_notation, write_key
from coalign_graders.notation import MathNode, are_assignments, is_assignment, read_answer
from coalign_graders.quantity import is_rounded, read_quantity, read_words
from coalign_graders.region import has_modulus, list_names, to_region

# (gold sides, predicted sides, relation): whether they say the same, where the relation is "", "=" or "<"
ExpressionComparer = Callable[[Sequence[str], Sequence[str], str], bool]


def is_same(gold: str, predicted: str, equal_expressions: ExpressionComparer) -> bool:
    """Whether two answers are equal. ``equal_expressions`` is called for those that have no structure of their own."""
    first, second = simplify_notation(gold), simplify_notation(predicted)
    if write_key(first) == write_key(second):
        return bool(first)
    if max(len(first), len(second)) > LONGEST:
        return False
    first, second = _read_comma(first, second), _read_comma(second, first)
    return _compare(read_answer(first), read_answer(second), equal_expressions)


def _read_comma(text: str, counterpart: str) -> str:
    """`1,22` next to a decimal or a fraction as 1.22, elsewhere as a list."""
    number = read_quantity(counterpart) if re.fullmatch(r"-?[0-9]+,[0-9]+", text) else None
    return text.replace(",", ".") if number and ("." in counterpart or number.value.denominator > 1) else text


def _compare(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    if gold == predicted:
        return True
    types = {gold.type, predicted.type}
    if "solutions" in types:
        left, right = (node.children[0] if node.type == "solutions" else node for node in (gold, predicted))
        return _compare(left, right, equal)
    if any(node.type == "relation" and node.text == "∈" for node in (gold, predicted)):
        left, right = (node.children[1] if node.text == "∈" else node for node in (gold, predicted))
        return _share_variables(gold, predicted) and _compare(left, right, equal)
    if "near" in types and "relation" not in types:
        return _compare_near(gold, predicted, equal)
    if "choice" in types:
        return _compare_choices(gold, predicted, equal)
    if gold.type == "list" and predicted.type == "list":
        return _compare_lists(gold, predicted, equal)
    if is_assignment(gold) and is_assignment(predicted):
        return _share_name(gold, predicted) and _compare(gold.children[1], predicted.children[1], equal)
    if is_assignment(predicted) and gold.type != "relation":
        return _compare(gold, predicted.children[1], equal)
    if is_assignment(gold) and predicted.type != "relation":
        return _compare(gold.children[1], predicted, equal)
    if gold.type == "list" and len(gold.children) == 1:
        return _compare(gold.children[0], predicted, equal)
    if predicted.type == "list" and len(predicted.children) == 1 and gold.type != "number":
        return _compare(gold, predicted.children[0], equal)
    if types & {"relation", "list", "conditions"} and (
        types & {"tuple", "union", "conditions"} or len(types) == 2 or has_modulus(gold) or has_modulus(predicted)
    ):
        left, right = to_region(gold), to_region(predicted)
        if left and right and (left, right) != (gold, predicted):
            return _share_variables(gold, predicted) and _compare(left, right, equal)
        if "conditions" in types:
            return not left and not right and len(types) == 1 and _match_all(gold.children, predicted.children, equal)
    if types == {"congruence"}:
        return _compare_congruences(gold, predicted, equal)
    if types == {"matrix", "tuple"}:  # a vector
        left, right = _to_tuple(gold), _to_tuple(predicted)
        return left.type == right.type and _compare(left, right, equal)
    if types == {"list", "tuple"}:  # a tuple without its brackets
        is_interval = gold.text + predicted.text != "()" and (
            gold.text + predicted.text != "[]" or len(gold.children) == 2
        )
        return not is_interval and _compare_in_order(_order_names(gold), _order_names(predicted), equal)
    if gold.type == "relation" and predicted.type == "relation":
        return _compare_relations(gold, predicted, equal)
    if gold.type == "number" and predicted.type == "number":
        return _is_equal_number(gold, predicted) and _agree(gold, predicted)
    number, counterpart = (gold, predicted) if gold.type == "number" else (predicted, gold)
    if types == {"number", "expression"} and number.unit and not counterpart.unit:  # `5 m`, where metres are asked for
        left, right = (_read_letter_unit(node) for node in (gold, predicted))
        if left.unit and right.unit:
            return _compare(left, right, equal)
    if gold.type == "number":  # `2+2` does not pay for 4
        return False
    if not _agree(gold, predicted):
        return False
    if gold.type != predicted.type:
        return types <= {"expression", "number", "words"} and equal([gold.text], [predicted.text], "")
    match gold.type:
        case "tuple" | "matrix":
            return gold.text == predicted.text and _compare_in_order(gold.children, predicted.children, equal)
        case "union" | "piecewise":
            return _match_all(list(dict.fromkeys(gold.children)), list(dict.fromkeys(predicted.children)), equal)
        case "ratio":
            return _compare_ratios(gold, predicted, equal)
        case "base" | "words":
            return gold.text == predicted.text
    return equal([gold.text], [predicted.text], "")


def _read_letter_unit(node: MathNode) -> MathNode:
    match = re.fullmatch(r"(.*[0-9.}])\s*([A-Za-z])((?:\^[23])?)", node.text)
    return read_answer(rf"{match[1]}\text{{{match[2]}}}{match[3]}") if match else node


def _compare_lists(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    named = [are_assignments(node.children) for node in (gold, predicted)]
    if any(named) and not all(named):  # values without their names mean something in the order of the names only
        return _compare_in_order(_order_names(gold), _order_names(predicted), equal)
    if gold.text != predicted.text and "or" in (gold.text, predicted.text):
        return False
    first, second = gold.children, predicted.children
    if "{}" in (gold.text, predicted.text):
        first = tuple(dict.fromkeys(first))
    if len(set(first)) == len(first):  # what is said twice is said once, except where the truth itself does so
        second = tuple(dict.fromkeys(second))
    order = {relation.children[0]: i for i, relation in enumerate(first)} if all(named) else {}
    if len(order) == len(first) == len(second) and order.keys() == {relation.children[0] for relation in second}:
        return _compare_in_order(first, sorted(second, key=lambda relation: order[relation.children[0]]), equal)
    return _match_all(first, second, equal)


def _order_names(node: MathNode) -> Sequence[MathNode]:
    """The items of a list; assignments to consecutive letters (x, y, z) are sorted by letter."""
    names = [relation.children[0].text for relation in node.children] if are_assignments(node.children) else []
    if "".join(sorted(names)) in "abcdefghijklmnopqrstuvwxyz" and all(len(name) == 1 for name in names):
        return sorted(node.children, key=lambda relation: relation.children[0].text) if names else node.children
    return node.children


def _share_variables(gold: MathNode, predicted: MathNode) -> bool:
    """Whether two relations are about the same variables, or one of two answers names none."""
    names = [names for names in map(list_names, (gold, predicted)) if names]
    return names[:1] == names[-1:]


def _share_name(gold: MathNode, predicted: MathNode) -> bool:
    """Whether two assignments have the same name; of labels (`red balls`) one may have fewer words."""
    first, second = gold.children[0], predicted.children[0]
    if first.type == second.type == "name":
        return first.text == second.text
    first_words, second_words = (node.label or read_words(node.text) for node in (first, second))
    return bool(first_words & second_words) and (first_words <= second_words or second_words <= first_words)


def _match_all(gold: Sequence[MathNode], predicted: Sequence[MathNode], equal: ExpressionComparer) -> bool:
    """Whether the answers of one sequence can be paired with equal answers of the other, in any order."""
    left = list(predicted)
    if len(gold) != len(left):
        return False
    for one in gold:
        keys = [candidate for candidate in left if candidate == one]
        partner = keys[0] if keys else next((candidate for candidate in left if _compare(one, candidate, equal)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _compare_in_order(gold: Sequence[MathNode], predicted: Sequence[MathNode], equal: ExpressionComparer) -> bool:
    return len(gold) == len(predicted) and all(_compare(*pair, equal) for pair in zip(gold, predicted, strict=True))


def _compare_relations(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    if gold.text == predicted.text and _compare_in_order(gold.children, predicted.children, equal):
        return True
    if gold.text != predicted.text or len(gold.text) > 1:
        return False
    if gold.text in "=≠" and _compare_in_order(gold.children, predicted.children[::-1], equal):
        return True
    first, second = ([side.text for side in node.children] for node in (gold, predicted))
    return equal(first, second, "=" if gold.text in "=≠" else "<")


def _compare_ratios(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    first, second = ([term.value for term in node.children if term.value] for node in (gold, predicted))
    if any(term.unit for term in (*gold.children, *predicted.children)):  # `3:15 pm`
        return _compare_in_order(gold.children, predicted.children, equal)
    if len(first) == len(second) == len(gold.children) == len(predicted.children):
        return all(a * second[0] == b * first[0] for a, b in zip(first, second, strict=True))
    return _compare_in_order(gold.children, predicted.children, equal)


def _compare_congruences(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """`n ≡ 3` and `10` modulo 7 are equal; two names must be the same."""
    if gold.value != predicted.value or (gold.text and predicted.text and gold.text != predicted.text):
        return False
    return _match_all(_list_residues(gold), _list_residues(predicted), equal)


def _list_residues(node: MathNode) -> list[MathNode]:
    modulus = node.value or 1
    return [n if n.value is None else replace(n, text="", value=n.value % modulus) for n in node.children]


def _compare_near(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """What is near a value is not an exact one: only a truth that is near, too, or a decimal is paid.

    Where an exact value stands before ≈, a truth pays for both, and an answer says the exact one.
    """
    said = predicted.children[-1] if predicted.type == "near" else predicted
    if gold.type == "near":
        if predicted.type == "near" and len(predicted.children) == 2:
            is_near = _are_near(gold.children[0], predicted.children[0], equal)
            return is_near and (len(gold.children) == 1 or _compare(gold.children[1], said, equal))
        return any(_compare(one, said, equal) for one in gold.children)
    is_integer = gold.value is not None and gold.value.denominator == 1
    if len(predicted.children) == 1 and (is_integer or "." not in said.text):
        return False
    return _compare(gold, said, equal)


def _are_near(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """Whether the decimal with fewer digits rounds the other."""
    texts = [re.fullmatch(r"-?[0-9]*\.?([0-9]*)", node.text) for node in (gold, predicted)]
    if gold.value is None or predicted.value is None or None in texts:
        return _compare(gold, predicted, equal)
    digits = min(len(text[1]) for text in texts if text)
    return 2 * 10**digits * abs(gold.value - predicted.value) <= 1


def _compare_choices(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    """`(C) 12` is C, and is 12; both count where both are said."""
    letters = [node.text for node in (gold, predicted) if node.type == "choice" or re.fullmatch("[A-J]", node.text)]
    if len(letters) == 2 and letters[0] != letters[1]:
        return False
    left, right = (node.children[0] if node.type == "choice" else node for node in (gold, predicted))
    return (len(letters) == 2 and gold.type != predicted.type) or _compare(left, right, equal)


def _to_tuple(node: MathNode) -> MathNode:
    """A matrix of one column or one row as a tuple."""
    rows = [row.children for row in node.children]
    if node.type != "matrix" or node.text or not (len(rows) == 1 or all(len(row) == 1 for row in rows)):
        return node
    return MathNode("tuple", "()", tuple(entry for row in rows for entry in row))


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


_CURRENCIES = ("dollar", "cent", "euro", "yen", "pound", "rupee")


def _agree(gold: MathNode, predicted: MathNode) -> bool:
    """Two units or nouns that are both known must be the same; others say nothing."""
    first, second = gold.unit, predicted.unit
    if "unit" in (first[:4], second[:4]):
        return True
    if not first or not second:
        nouns = [node.noun for node in (gold, predicted) if not node.unit]
        if len(nouns) == 2:
            return nouns[0] <= nouns[1] or nouns[1] <= nouns[0]
        return not any(len(word) < 4 for noun in nouns if len(noun) == 1 for word in noun)  # a symbol, as mA is for A
    (first_unit, _, first_per), (second_unit, _, second_per) = first.partition("/"), second.partition("/")
    if (first_per and second_per) or not (first_unit and second_unit):
        return first_per == second_per and (first_unit == second_unit or not first_unit or not second_unit)
    return first_unit == second_unit and (first_per == second_per or first_unit in _CURRENCIES)
