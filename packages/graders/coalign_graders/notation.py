"""Mathematical answers as structures: numbers with units, lists, tuples, intervals, relations, matrices, expressions.

`layout.py` takes the layout away, `read_answer` finds the structure. `equality.py` compares two of them. The checker's
process loads this file by its path, so it needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from coalign_graders.layout import ROW, find_closing, levels, strip_braces, write_key
from coalign_graders.quantity import (
    CURRENCIES,
    FUNCTION,
    HEDGES,
    TEXT_CONTENT,
    read_numeral,
    read_quantity,
    read_unit,
    read_words,
)

_ITEMS = 64  # longer lists equal nothing but themselves


@dataclass(frozen=True)
class MathNode:
    """A mathematical answer, by its ``type``.

    `list` (no order; ``text`` is `{}` for a set, `or` for alternatives that are words), `conditions` (relations that
    hold together; ``text`` is `,` where a comma joins them), `solutions` (the set of what fulfils its child),
    `congruence` (``text`` has the name, ``value`` the modulus), `piecewise`, `tuple` (``text`` has its brackets),
    `union`, `relation` (``text`` has its signs), `matrix` (a `tuple` for each row), `ratio`, `base`, `number`, `near`
    (what follows ≈, then the exact value before it if there is one), `choice` (``text`` has its letter), `name`,
    `label` (words that tell numbers of a list apart), `words` or `expression`. ``text`` is the normalised answer where
    nothing else is said.
    """

    type: str
    text: str
    children: tuple[MathNode, ...] = ()
    value: Fraction | None = None
    unit: str = ""
    noun: frozenset[str] = frozenset()
    label: frozenset[str] = frozenset()


_RELATION = "<>≤≥=≠≈∈"
_MATRIX = re.compile(r"[(\[]?\s*\\begin\{([pbBvV]?matrix|array)\}(?:\s*\{[^{}]*\})?(.*)\\end\{\1\}\s*[)\]]?", re.DOTALL)
_BASE = re.compile(
    r"\(?((?=[A-Fa-f]*[0-9]|[A-Fa-f]{2})[0-9A-Fa-f]+)\)?\s*(?:_\s*\{?\s*(\w+)\s*\}?|\(?base[ -](\w+)\)?)"
)
_SIMPLE_NAME = (
    r"(?:m?\s*\\angle\s*)?\|?(?:[A-Za-z]|[A-Z]{2,4}|d[a-z]|\\[a-z]+)(?:'{0,3}|\^\*)"
    r"(?:_(?:\w|\{[^{}]*\}))?(?:\((?:[a-z]|\d{1,4})\))?\|?"
)
_NAME = re.compile(  # a variable, a length `AB`, `f(x)`, `|z|`, an angle, a ratio of such; not a product like `xy`
    rf"[a-zA-Z]\^\{{-1\}}\([a-z]\)|{_SIMPLE_NAME}|"
    r"\|?\\(?:bar|hat|vec|tilde|dot|overline|text|angle)\s*\{[^{}]*\}(?:_\w)?\|?|"
    r"\[[A-Z]{3,}\]|(?:P|\\?Pr|E|Var|Cov|[fghFGH]'{0,2}|\\text\{(?:Var|Cov|Pr|E|P)\})"
    r"(?:_\w)?\s*(?:\([^()]*\)|\[[^\[\]]*\])|"  # `P(X>3)`
    r"\\(?:sin|cos|tan|cot|sec|csc)\s*\(?(?:[A-Z]|\\[a-z]+|(?:\\angle\s*)?[A-Z]{3})\)?"  # `\sin\theta`, but not of x
)
_CHOICE = re.compile(r"(?:\\text\{\s*)?\(?([A-J])\)\s*\}?\s*([^\s(}].*)")
_COMPOUND = re.compile(r"(?:(?<=\})|(?<=[a-z])\s)\s*(?=[0-9])")  # between the quantities of `3 h 20 min`
_LAST_LETTERS = re.compile(r"(?<=[0-9])\s*([a-z]{1,4})$")
_BUILDER = re.compile(r"([a-z])\s*(?:∈\s*ℝ\s*)?[|:]\s*(.+)")  # `x : x > 2` in braces
# What words say that signs say, too.
_SYNONYMS = {
    "infinity": "∞", "positive infinity": "∞", "negative infinity": "-∞", "minus infinity": "-∞", "empty set": "∅",
    "no solution": "∅", "no solutions": "∅", "no real solution": "∅", "no real solutions": "∅",
    "infinitely many solutions": "infinitely many", "all real numbers": "ℝ", "all reals": "ℝ", "dne": "does not exist",
}  # fmt: skip
_HOLES = re.compile(r"ℝ\s*(?:\\setminus|\\backslash|∖|-)\s*\\\{([^{}]*)\\\}")
_CASES = re.compile(r"(?:([^=<>≤≥≠]{1,20})=)?\s*\\begin\{cases\}(.*)\\end\{cases\}")
_CONGRUENCE = re.compile(  # `n \equiv 3 \pmod 7`
    r"(?:([a-zA-Z])\s*\\equiv)?([^\\=]*[^\\=(\s])\s*\(?\s*(?:\\mod|\bmod)\s*\{?\s*([1-9][0-9]{0,30})\s*\}?\s*\)?"
)
_TITLE = re.compile(r"(?:\\text\{[^{}]*\}|[A-Za-z]{3,}[A-Za-z ]*)")


LOWEST, HIGHEST = MathNode("expression", "-∞"), MathNode("expression", "∞")


def read_answer(text: str, depth: int = 0) -> MathNode:
    """The structure of an answer in simplified notation."""
    text = strip_braces(text.strip().rstrip("."))
    plain = MathNode("expression", re.sub(rf"[{CURRENCIES}]", "", text))
    if depth > 8:
        return plain
    if text == "∅":
        return MathNode("list", "")
    if text == "ℝ":
        return MathNode("tuple", "()", (LOWEST, HIGHEST))
    if holes := _HOLES.fullmatch(text):
        left_out = read_answer(holes[1], depth + 1)
        values = left_out.children if left_out.type == "list" else (left_out,)
        name = MathNode("expression", "x")
        return MathNode("conditions", "", tuple(MathNode("relation", "≠", (name, value)) for value in values))
    if (based := _read_base(TEXT_CONTENT.sub(r"\1", text))) is not None:
        return based
    if (number := read_quantity(text)) is not None:
        return MathNode("number", text, (), *number)
    quantities = [_LAST_LETTERS.sub(r"\\text{\1}", quantity) for quantity in _COMPOUND.split(text)]
    if len(quantities) > 1 and all(one and one.unit for one in map(read_quantity, quantities)):
        return _read_list(quantities, depth)
    if matrix := _MATRIX.fullmatch(text):
        if r"\begin" in matrix[2]:
            return plain
        rows = [row for row in matrix[2].split(ROW) if row.strip()]
        cells = [tuple(read_answer(cell, depth + 1) for cell in row.split("&")) for row in rows]
        return MathNode(
            "matrix", "v" if matrix[1][0] == "v" else "", tuple(MathNode("tuple", "", row) for row in cells)
        )
    if (cases := _CASES.fullmatch(text)) and r"\begin" not in cases[2]:
        return _read_cases(cases[1] or "", cases[2], depth)
    if congruence := _CONGRUENCE.fullmatch(text):
        residues = read_answer(congruence[2], depth + 1)
        children = residues.children if residues.type == "list" else (residues,)
        return MathNode("congruence", congruence[1] or "", children, value=Fraction(congruence[3]))
    for separator in (";", " or ", " and ", ","):
        items = _split(text, separator)
        if len(items) > 1:
            return _read_list(items, depth, separator) if len(items) <= _ITEMS else plain
    if text.startswith(r"\{") and text.endswith(r"\}") and find_closing(text, 1) == len(text) - 1:
        inside = text[2:-2].strip()
        if (builder := _BUILDER.fullmatch(inside)) and re.search(rf"\b{builder[1]}\b", builder[2]):
            return MathNode("solutions", "", (read_answer(builder[2], depth + 1),))
        for separator in (":", "|"):
            if len(sides := _split(inside, separator)) == 2:  # `2n : n ∈ ℤ`
                return MathNode("tuple", "{:}", tuple(read_answer(side, depth + 1) for side in sides))
        node = read_answer(inside, depth + 1)
        children = node.children if node.type == "list" and not node.text and inside != "∅" else (node,)
        return MathNode("list", "{}", children if inside else ())
    if text.count("±") > 1 and "∓" not in text and text[:1] in "([" and text.count("±") <= 4:  # (±1, ±2): four
        return _read_list([text.replace("±", sign, 1) for sign in "+-"], depth)
    if "±" in text or "∓" in text:
        upper = text.replace("±", "+").replace("∓", "-")
        lower = text.replace("±", "-").replace("∓", "+")
        return _read_list([upper, lower], depth)
    if len(sets := _split(text, "∪")) > 1:
        return MathNode("union", text, tuple(read_answer(one, depth + 1) for one in sets))
    if (relation := _read_relation(text, depth)) is not None:
        return relation
    if text[:1] in ("(", "[") and find_closing(text, 0) == len(text) - 1:
        items = _split(text[1:-1], ";" if len(_split(text[1:-1], ";")) > 1 else ",")
        if len(items) > 1 and len(items) <= _ITEMS:
            return MathNode("tuple", text[0] + text[-1], tuple(read_answer(item, depth + 1) for item in items))
        if text[0] == "(" and (_is_words(text[1:-1]) or read_quantity(text[1:-1]) is not None):
            return read_answer(text[1:-1], depth + 1)
    if (named := re.fullmatch(r"([A-Z])\s*(\(.*\))", text)) and find_closing(named[2], 0) == len(named[2]) - 1:
        point = read_answer(named[2], depth + 1)
        if point.type == "tuple":  # `P(2, 5)`
            return MathNode("relation", "=", (MathNode("name", named[1]), point))
    if choice := _CHOICE.fullmatch(text):
        return MathNode("choice", choice[1], (read_answer(choice[2], depth + 1),))
    if len(terms := _split(text, ":")) > 1:
        ratio = tuple(read_answer(term, depth + 1) for term in terms)
        return MathNode("ratio", text, ratio)
    if _is_words(text):
        words = _read_words(text)
        return read_answer(_SYNONYMS[words], depth + 1) if words in _SYNONYMS else MathNode("words", words)
    unit = re.fullmatch(r"(.*[^\s])\s*(\\text\{([^{}]*)\}(?:\^[23])?)", text)
    if not unit or HEDGES.search(unit[3]):
        return plain
    unit_name = read_unit(unit[2]) or ""
    return MathNode("expression", unit[1], unit=unit_name, noun=frozenset() if unit_name else read_words(unit[3]))


def _read_base(text: str) -> MathNode | None:
    match = _BASE.fullmatch(" ".join(text.split()))
    name = match and (match[2] or match[3])
    base = name and (Fraction(name) if name.isdecimal() else read_numeral(name))
    if not match or not base or not 2 <= base <= 36:
        return None
    digits = match[1].lower().lstrip("0") or "0"
    if any(int(digit, 36) >= base for digit in digits):
        return None
    return MathNode("number", text, value=Fraction(digits)) if base == 10 else MathNode("base", f"{digits}_{base}")


def _read_list(texts: Sequence[str], depth: int = 0, separator: str = ",") -> MathNode:
    """A list without order. Lists in it are joined, except groups of assignments (`p=5, q=2 or p=7, q=2`).

    Inequalities that "and" or a comma joins are `conditions`.
    """
    nodes = [read_answer(text, depth + 1) for text in texts if text.strip()]
    if separator in (" and ", ",") and all(node.type in ("relation", "conditions") for node in nodes):
        relations = [one for node in nodes for one in (node.children if node.type == "conditions" else (node,))]
        if any(relation.text != "=" for relation in relations):
            loose = separator == "," or any(node.type == "conditions" and node.text == "," for node in nodes)
            return MathNode("conditions", "," if loose else "", tuple(relations))
    if separator == " or " and all(node.type == "words" for node in nodes):
        return MathNode("list", "or", tuple(nodes))
    if separator == " or " and (union := _unite(nodes)):
        return union
    groups = [node for node in nodes if node.type == "list"]
    if len(groups) == len(nodes) and len(nodes) > 1 and all(are_assignments(node.children) for node in groups):
        return MathNode("list", "", tuple(nodes))
    flat = [item for node in nodes for item in (node.children if node.type == "list" and not node.text else (node,))]
    names = {item.children[0].text for item in flat if item.type == "relation"}
    for i, node in enumerate(flat[1:], 1):  # `x = 1, 2` says `x = 1, x = 2`
        previous = flat[i - 1]
        if node.type in ("number", "expression") and len(names) == 1 and is_assignment(previous):
            flat[i] = MathNode("relation", "=", (previous.children[0], node))
    if len({node.label for node in flat}) > 1 and all(node.label for node in flat):  # `5 red, 3 blue`
        flat = [MathNode("relation", "=", (MathNode("label", "", label=node.label), node)) for node in flat]
    return MathNode("list", "", tuple(flat))


def _unite(nodes: Sequence[MathNode]) -> MathNode | None:
    """The union that `x ∈ (1, 2) or x ∈ (3, 4)` says, and intervals that are certain not to be points."""
    if {node.text for node in nodes} == {"∈"} and len({node.children[0] for node in nodes}) == 1:
        union = MathNode("union", "", tuple(node.children[1] for node in nodes))
        return MathNode("relation", "∈", (nodes[0].children[0], union))
    if all(n.type == "tuple" and (n.text in ("[)", "(]") or {LOWEST, HIGHEST} & set(n.children)) for n in nodes):
        return MathNode("union", "", tuple(nodes))
    return None


def _read_cases(name: str, body: str, depth: int) -> MathNode:
    """A function by cases, in any order; of one column the lines are a list."""
    rows = [[cell.strip(" ,.;") for cell in row.split("&")] for row in body.split(ROW) if row.strip()]
    if all(len(row) == 1 for row in rows):
        return _read_list([row[0] for row in rows], depth)
    lines = []
    for row in rows:
        condition = re.sub(r"^\s*(?:if|for|when)\b", "", TEXT_CONTENT.sub(r"\1 ", row[-1]))
        lines.append(MathNode("tuple", "", tuple(read_answer(one, depth + 1) for one in (*row[:-1], condition))))
    function = MathNode("piecewise", "", tuple(lines))
    return MathNode("relation", "=", (MathNode("name", write_key(name)), function)) if name.strip() else function


def _read_relation(text: str, depth: int) -> MathNode | None:
    sides, signs = _split_relation(text)
    if not signs:
        return None
    if "≈" in signs:
        return _read_near(text, depth) if set(signs) <= set("=≈") else None
    if "∈" in signs:
        name, region = MathNode("name", write_key(sides[0])), read_answer(sides[-1], depth + 1)
        return MathNode("relation", "∈", (name, region)) if len(signs) == 1 and is_name(sides[0]) else None
    if not all(side.strip() for side in sides):
        return None
    nodes = tuple(read_answer(side, depth + 1) for side in sides)
    if set(signs) == {"="}:
        if is_name(sides[0]):
            return MathNode("relation", "=", (MathNode("name", write_key(sides[0])), nodes[-1]))
        if is_name(sides[-2]):  # `1 + 1 = x = 2`
            return MathNode("relation", "=", (MathNode("name", write_key(sides[-2])), nodes[-1]))
        left = re.sub(r"\\(?:times|cdot|frac|sqrt|div)", "*", "".join(sides[:-1]))
        if nodes[-1].type == "number" and nodes[0].type != "number" and not re.search(r"[A-Za-z]", left):
            return nodes[-1]  # a calculation: `9 * 2 = 18`
    if set(signs) <= set(">≥"):
        nodes = nodes[::-1]
        signs = ["<" if sign == ">" else "≤" for sign in reversed(signs)]
    return MathNode("relation", "".join(signs), nodes)


def _read_near(text: str, depth: int) -> MathNode:
    """`x = 1/3 ≈ 0.333` says that x is 1/3, `P(X > 3) ≈ 0.12` that what stands before ≈ is near 0.12."""
    exact, _, rounded = (side.strip() for side in text.partition("≈"))
    sides, _ = _split_relation(exact)
    children = (read_answer(rounded, depth + 1),)
    if _is_constant(sides[-1]):
        children = (*children, read_answer(sides.pop(), depth + 1))
    near, name = MathNode("near", text, children), sides[0] if sides else ""
    return MathNode("relation", "=", (MathNode("name", write_key(name)), near)) if name.strip() else near


def _is_constant(text: str) -> bool:
    r"""Whether an expression has a digit or π, and no letter but e, i and those of functions and of `\text{}`."""
    bare = re.sub(
        r"\\?(?:frac|binom|cdot|times|infty|overline|arc[a-z]{3})|(?<![A-Za-z])[ei](?![A-Za-z])",
        "",
        TEXT_CONTENT.sub("", text),
    )
    return bool(re.search(r"[0-9]|\\pi", text)) and not re.search(r"[^\W\d_]", FUNCTION.sub("", bare))


def _split_relation(text: str) -> tuple[list[str], list[str]]:
    sides, signs, start = [], [], 0
    for i, level in levels(text):
        if not level and text[i] in _RELATION:
            sides.append(text[start:i])
            signs.append(text[i])
            start = i + 1
    return [*sides, text[start:]], signs


def is_name(text: str) -> bool:
    text = text.strip()
    inside = text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text
    if inside is not text:
        return all(_NAME.fullmatch(name.strip()) for name in inside.split(","))
    ratio = re.fullmatch(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", text)
    names = ratio.groups() if ratio else text.split(":")
    return bool(_TITLE.fullmatch(text)) or all(_NAME.fullmatch(name.strip()) for name in names)


def is_assignment(node: MathNode) -> bool:
    return node.type == "relation" and node.text == "=" and node.children[0].type in ("name", "label")


def are_assignments(nodes: Sequence[MathNode]) -> bool:
    return len(nodes) > 1 and all(map(is_assignment, nodes)) and len({node.children[0] for node in nodes}) > 1


def _is_words(text: str) -> bool:
    r"""Whether the text is words: letters and punctuation, a word of three letters or more, or in `\text{}`."""
    bare = TEXT_CONTENT.sub(r"\1", text).strip("( )")
    is_function = re.search(r"\\text\{[^{}]*\}\s*\(-?\w\)", text)
    if is_function or not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s,.'!?()-])*", bare):
        return False
    return bool(len(bare) == 1 or r"\text" in text or re.search(r"[^\W\d_]{3}|^(?:no|if)$", bare, re.IGNORECASE)) and (
        r"\text" in text or not FUNCTION.match(bare)
    )


def _read_words(text: str) -> str:
    bare = " ".join(re.findall(r"[\w']+", TEXT_CONTENT.sub(r"\1", text)))
    if option := re.fullmatch(r"(?:(?i:the )?(?i:option|choice|answer) )?(\w)", bare):  # `E` is not `e`
        return option[1]
    return re.sub(r"^(?:(?:it is|there (?:is|are))\s+)?(?:(?:the|an?)\s+)?", "", bare.casefold())


def _split(text: str, separator: str) -> list[str]:
    """Split a text at the separators that stand outside of brackets; empty pieces are left out."""
    pieces, start, width = [], 0, len(separator)
    for i, level in levels(text):
        if not level and i >= start and text.startswith(separator, i):
            pieces.append(text[start:i])
            start = i + width
    return [piece.strip() for piece in (*pieces, text[start:]) if piece.strip(" ,")]
