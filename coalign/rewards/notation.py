"""Mathematical answers as structures: numbers with units, lists, tuples, intervals, relations, matrices, expressions.

`is_same` compares two answers part by part, never by a prefix. Expressions without further structure go to
`equal_expressions`, which the caller supplies, because computer algebra belongs in a process that can be killed
(`checker.py`). The checker's process loads this file by its path, so it is one and needs only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

LONGEST = 400  # characters of an answer; longer ones equal nothing but themselves
_ITEMS = 64  # of a list, likewise
_EXPONENT = 1000  # of ten in a number, likewise
_PRECISION = 6  # significant digits from which a decimal may stand for a value that has no end

# (gold sides, predicted sides, relation): whether they say the same, where the relation is "", "=" or "<"
ExpressionComparer = Callable[[Sequence[str], Sequence[str], str], bool]


@dataclass(frozen=True)
class MathNode:
    """An answer of one ``kind``.

    `list` (no order; ``text`` is `{}` for a set), `tuple` (``text`` has its brackets), `union`, `relation` (``text``
    has its signs), `matrix` (a `tuple` for each row), `ratio`, `base`, `number`, `near` (what follows ≈), `choice`
    (``text`` has its letter), `words` or `expression`. ``text`` is the normalised answer where nothing else is said.
    """

    kind: str
    text: str
    parts: tuple[MathNode, ...] = ()
    value: Fraction | None = None
    unit: str = ""


def is_same(gold: str, predicted: str, equal_expressions: ExpressionComparer) -> bool:
    """Whether two answers are equal. ``equal_expressions`` is called for those that have no structure of their own."""
    first, second = simplify_notation(gold), simplify_notation(predicted)
    if _key(first) == _key(second):
        return bool(first)
    if max(len(first), len(second)) > LONGEST:
        return False
    if _compare(read_answer(first), read_answer(second), equal_expressions):
        return True
    if (decimals := _read_comma(first, second)) is not None:
        return decimals
    if _GROUPED.search(first):  # `100,200` is a number or a list
        one, other = (read_answer(_GROUPED.sub(", ", text)) for text in (first, second))
        return _compare(one, other, equal_expressions)
    return False


def _read_comma(first: str, second: str) -> bool | None:
    """Compare `1,22` with 1.22: next to a number that is not whole, the comma of another is a decimal one."""
    for one, other in ((first, second), (second, first)):
        if re.fullmatch(r"-?(?:0|(?![0-9]{1,3},[0-9]{3}$)[0-9]+),[0-9]+", one):
            number = _read_number(other)
            if number and number.value is not None and ("." in other or number.value.denominator > 1):
                return Fraction(one.replace(",", ".")) == number.value
    return None


# -- notation -------------------------------------------------------------------------------------------------------

_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "√": r"\sqrt ", "²": "^2", "³": "^3",
    "∪": "∪", "⟨": "(", "⟩": ")", "“": "", "”": "", "（": "(", "）": ")", "，": ",",
}  # fmt: skip
_ROW = "¶"  # between the rows of a matrix
_COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥",
    "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "approx": "≈", "simeq": "≈", "in": "∈",
    "cup": "∪", "pm": "±", "mp": "∓", "infty": "∞", "langle": "(", "rangle": ")", "lbrace": r"\{", "rbrace": r"\}",
    "degree": "°", "quad": " ", "qquad": " ", "left": "", "right": "", "big": "", "Big": "", "bigl": "", "bigr": "",
    "Bigl": "", "Bigr": "", "displaystyle": "", "boldsymbol": "", "mathbf": "", "limits": "", "land": " and ",
    "lor": " or ", "colon": ":", "lvert": "|", "rvert": "|", "mid": "|", "ast": "*", "arccos": r"\arccos",
    "boxed": "", "fbox": "", "emptyset": "∅", "varnothing": "∅",
}  # fmt: skip
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|operatorname|rm|bf)\s*\{([^{}]*)\}")
_TEXT_CONTENT = re.compile(r"\\text\{([^{}]*)\}")
_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")


def simplify_notation(answer: str) -> str:
    r"""An answer without layout: one spelling for each sign, `\frac{a}{b}` for all fractions, words in `\text{}`."""
    text = answer[: 8 * LONGEST].strip()
    text = "".join(_SYMBOLS.get(character, character) for character in text)
    text = re.sub(r"\\\\(?:\s*\[[0-9.]+\s*[a-z]{2}\])?", _ROW, text)
    text = re.sub(r",\s*\\!\s*|\{,\}", ",", text)
    text = re.sub(r"\\[()\[\]!]", "", text).replace(r"\$", "＄")
    text = re.sub(r"\\mathbb\s*(?:R|\{R\})", "ℝ", text)
    text = re.sub(r"\\[,;: ]|~", " ", text).replace(r"\%", "%").replace("$", "")
    text = _TEXT.sub(_unwrap, text)
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text, flags=re.IGNORECASE)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: _COMMANDS.get(found[1], found[0]), text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "°", text)
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text).replace("**", "").replace("`", "")
    text = text.replace("<=", "≤").replace(">=", "≥").replace("!=", "≠").replace("+∞", "∞").replace(r"\sqrt ", r"\sqrt")
    text = re.sub(r"([)\]}])\s*U\s*([(\[\\])", r"\1∪\2", text)
    text = re.sub(r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}", text)
    text = _FRAC.sub(r"\\frac{\1\2}{\3\4}", text)
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    text = re.sub(r"(?<=[)\]}0-9])\s*(or|and)\s*(?=[(\[{0-9\\-])", r" \1 ", text)
    text = re.sub(r"(?<=[0-9])\s*(?:\bto\b|\\text\{to\})\s*(?=[0-9])", ":", text)
    return _strip_braces(" ".join(text.split()).strip(" *").rstrip(".,;: "))


def _strip_braces(text: str) -> str:
    while text.startswith("{") and _closes_at(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _unwrap(found: re.Match[str]) -> str:
    inside = found[1].strip(" ~")
    return f" {inside} " if inside.lower() in ("and", "or", ",", "") else rf"\text{{{inside}}}"


def _key(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)  # `1 2` is not 12


# -- structure ------------------------------------------------------------------------------------------------------

_OPENING, _CLOSING = "([{", ")]}"
_RELATION = "<>≤≥=≠≈∈"
_MATRIX = re.compile(r"[(\[]?\s*\\begin\{([pbBvV]?matrix|array)\}(?:\s*\{[^{}]*\})?(.*)\\end\{\1\}\s*[)\]]?", re.DOTALL)
_BASE = re.compile(r"\(?((?=[A-Fa-f]*[0-9])[0-9A-Fa-f]+)\)?\s*(?:_\s*\{?\s*(\w+)\s*\}?|\(?base[ -](\w+)\)?)")
_NAME = re.compile(  # a variable, a length `AB`, `f(x)`, `|z|`, an angle, a ratio of such; not a product like `xy`
    r"[a-zA-Z]\^\{-1\}\([a-z]\)|"
    r"(?:\\angle\s*)?\|?(?:[A-Za-z]|[A-Z]{2,4}|\\[a-z]+)'?(?:_(?:\w|\{[^{}]*\}))?(?:\((?:[a-z]|\d{1,4})\))?\|?"
)
_CHOICE = re.compile(r"(?:\\text\{\s*)?\(?([A-J])\)\s*\}?\s*([^\s(}].*)")
_BUILDER = re.compile(r"([a-z])\s*(?:∈\s*ℝ\s*)?[|:]\s*(.+)")  # `x : x > 2` in braces
_CURRENCIES = "＄€£¥"
# What words say that signs say, too.
_SYNONYMS = {
    "infinity": "∞", "positive infinity": "∞", "negative infinity": "-∞", "minus infinity": "-∞", "empty set": "∅",
    "no solution": "∅", "no solutions": "∅", "all real numbers": "ℝ", "all reals": "ℝ", "dne": "does not exist",
}  # fmt: skip
_TITLE = re.compile(r"(?:\\text\{[^{}]*\}|[A-Za-z]{3,}[A-Za-z ]*)")


_LOWEST, _HIGHEST = MathNode("expression", "-∞"), MathNode("expression", "∞")


def read_answer(text: str, depth: int = 0) -> MathNode:
    """The structure of an answer in simplified notation."""
    text = _strip_braces(text.strip().rstrip("."))
    plain = MathNode("expression", re.sub(rf"[{_CURRENCIES}]", "", text))
    if depth > 8:
        return plain
    if text == "∅":
        return MathNode("list", "")
    if text == "ℝ":
        return MathNode("tuple", "()", (_LOWEST, _HIGHEST))
    if (based := _read_base(_TEXT_CONTENT.sub(r"\1", text))) is not None:
        return based
    if (number := _read_number(text)) is not None:
        return number
    if matrix := _MATRIX.fullmatch(text):
        if r"\begin" in matrix[2]:
            return plain
        rows = [row for row in matrix[2].split(_ROW) if row.strip()]
        cells = [tuple(read_answer(cell, depth + 1) for cell in row.split("&")) for row in rows]
        return MathNode(
            "matrix", "v" if matrix[1][0] == "v" else "", tuple(MathNode("tuple", "", row) for row in cells)
        )
    for separators in (";", " or ", " and ", ","):
        parts = _split(text, separators)
        if len(parts) > 1:
            return _read_list(parts, depth) if len(parts) <= _ITEMS else plain
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at(text, 1) == len(text) - 1:
        inside = text[2:-2].strip()
        if (builder := _BUILDER.fullmatch(inside)) and re.search(rf"\b{builder[1]}\b", builder[2]):
            return read_answer(builder[2], depth + 1)
        node = read_answer(inside, depth + 1)
        parts = node.parts if node.kind == "list" and not node.text and inside != "∅" else (node,)
        return MathNode("list", "{}", parts if inside else ())
    if "±" in text or "∓" in text:
        upper = text.replace("±", "+").replace("∓", "-")
        lower = text.replace("±", "-").replace("∓", "+")
        return _read_list([upper, lower], depth)
    if len(parts := _split(text, "∪")) > 1:
        return MathNode("union", text, tuple(read_answer(part, depth + 1) for part in parts))
    if (relation := _read_relation(text, depth)) is not None:
        return relation
    if text[:1] in ("(", "[") and _closes_at(text, 0) == len(text) - 1:
        parts = _split(text[1:-1], ";" if len(_split(text[1:-1], ";")) > 1 else ",")
        if len(parts) > 1 and len(parts) <= _ITEMS:
            return MathNode("tuple", text[0] + text[-1], tuple(read_answer(part, depth + 1) for part in parts))
        if text[0] == "(" and (_is_words(text[1:-1]) or _read_number(text[1:-1]) is not None):
            return read_answer(text[1:-1], depth + 1)
    if (named := re.fullmatch(r"([A-Z])\s*(\(.*\))", text)) and _closes_at(named[2], 0) == len(named[2]) - 1:
        point = read_answer(named[2], depth + 1)
        if point.kind == "tuple":  # `P(2, 5)`
            return MathNode("relation", "=", (MathNode("name", named[1]), point))
    if choice := _CHOICE.fullmatch(text):
        return MathNode("choice", choice[1], (read_answer(choice[2], depth + 1),))
    if len(parts := _split(text, ":")) > 1:
        ratio = tuple(read_answer(part, depth + 1) for part in parts)
        return MathNode("ratio", text, ratio)
    if _is_words(text):
        words = _read_words(text)
        return read_answer(_SYNONYMS[words], depth + 1) if words in _SYNONYMS else MathNode("words", words)
    unit = re.fullmatch(r"(.*[^\s])\s*\\text\{([^{}]*)\}(?:\^[23])?", text)
    return MathNode("expression", unit[1]) if unit and not _HEDGES.search(unit[2]) else plain


def _read_base(text: str) -> MathNode | None:
    found = _BASE.fullmatch(" ".join(text.split()))
    name = found and (found[2] or found[3])
    base = name and (Fraction(name) if name.isdecimal() else _read_numeral(name))
    if not found or not base or not 2 <= base <= 36:
        return None
    digits = found[1].lower().lstrip("0") or "0"
    if any(int(digit, 36) >= base for digit in digits):
        return None
    return MathNode("number", text, value=Fraction(digits)) if base == 10 else MathNode("base", f"{digits}_{base}")


def _read_list(texts: Sequence[str], depth: int = 0) -> MathNode:
    """A list without order. Lists in it are joined, except groups of assignments (`p=5, q=2 or p=7, q=2`)."""
    nodes = [read_answer(text, depth + 1) for text in texts if text.strip()]
    groups = [node for node in nodes if node.kind == "list"]
    if len(groups) == len(nodes) and len(nodes) > 1 and all(_are_assignments(node.parts) for node in groups):
        return MathNode("list", "", tuple(nodes))
    flat = [part for node in nodes for part in (node.parts if node.kind == "list" and not node.text else (node,))]
    names = {part.parts[0].text for part in flat if part.kind == "relation"}
    for i, node in enumerate(flat[1:], 1):  # `x = 1, 2` says `x = 1, x = 2`
        before = flat[i - 1]
        if node.kind in ("number", "expression") and len(names) == 1 and _is_assignment(before):
            flat[i] = MathNode("relation", "=", (before.parts[0], node))
    return MathNode("list", "", tuple(flat))


def _read_relation(text: str, depth: int) -> MathNode | None:
    sides, signs = _split_relation(text)
    if not signs:
        return None
    if "≈" in signs:  # `x = 1/3 ≈ 0.333` says 1/3, `x ≈ 3.1` says that it is near 3.1
        exact, _, rounded = text.partition("≈")
        if exact.strip() and not _is_name(exact):
            return read_answer(exact, depth + 1)
        near = MathNode("near", text, (read_answer(rounded, depth + 1),))
        return MathNode("relation", "=", (MathNode("name", _key(exact)), near)) if exact.strip() else near
    if "∈" in signs:
        return read_answer(sides[-1], depth + 1) if len(signs) == 1 and _is_name(sides[0]) else None
    if not all(side.strip() for side in sides):
        return None
    nodes = tuple(read_answer(side, depth + 1) for side in sides)
    if set(signs) == {"="}:
        if _is_name(sides[0]):
            return MathNode("relation", "=", (MathNode("name", _key(sides[0])), nodes[-1]))
        if _is_name(sides[-2]):  # `1 + 1 = x = 2`
            return MathNode("relation", "=", (MathNode("name", _key(sides[-2])), nodes[-1]))
        left = re.sub(r"\\(?:times|cdot|frac|sqrt|div)", "*", "".join(sides[:-1]))
        if nodes[-1].kind == "number" and nodes[0].kind != "number" and not re.search(r"[A-Za-z]", left):
            return nodes[-1]  # a calculation: `9 * 2 = 18`
    if set(signs) <= set(">≥"):
        nodes = nodes[::-1]
        signs = ["<" if sign == ">" else "≤" for sign in reversed(signs)]
    return MathNode("relation", "".join(signs), nodes)


def _split_relation(text: str) -> tuple[list[str], list[str]]:
    sides, signs, start = [], [], 0
    for i, level in _levels(text):
        if not level and text[i] in _RELATION:
            sides.append(text[start:i])
            signs.append(text[i])
            start = i + 1
    return [*sides, text[start:]], signs


def _is_name(text: str) -> bool:
    text = text.strip()
    inside = text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text
    if inside is not text:
        return all(_NAME.fullmatch(part.strip()) for part in inside.split(","))
    ratio = re.fullmatch(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", text)
    parts = ratio.groups() if ratio else text.split(":")
    return bool(_TITLE.fullmatch(text)) or all(_NAME.fullmatch(part.strip()) for part in parts)


def _is_assignment(node: MathNode) -> bool:
    return node.kind == "relation" and node.text == "=" and node.parts[0].kind == "name"


def _are_assignments(nodes: Sequence[MathNode]) -> bool:
    return len(nodes) > 1 and all(map(_is_assignment, nodes)) and len({node.parts[0].text for node in nodes}) > 1


def _is_words(text: str) -> bool:
    r"""Whether the text is words: letters and punctuation, a word of three letters or more, or in `\text{}`."""
    bare = _TEXT_CONTENT.sub(r"\1", text).strip("( )")
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s,.'!?()-])*", bare):
        return False
    return bool(len(bare) == 1 or r"\text" in text or re.search(r"[^\W\d_]{3}|^(?:no|if)$", bare, re.IGNORECASE)) and (
        r"\text" in text or not _FUNCTION.match(bare)
    )


def _read_words(text: str) -> str:
    bare = " ".join(re.findall(r"[\w']+", _TEXT_CONTENT.sub(r"\1", text)))
    return (
        re.sub(r"^(?:it is\s+)?(?:(?:the|an?)\s+)?", "", bare.casefold()) if len(bare) > 1 else bare
    )  # `E` is not `e`


def _levels(text: str):
    """The positions of a text with the depth of brackets around them."""
    level = 0
    for i, character in enumerate(text):
        if character in _CLOSING:
            level = max(level - 1, 0)
        yield i, level
        if character in _OPENING:
            level += 1


def _closes_at(text: str, start: int) -> int:
    """Where the bracket at ``start`` closes; -1 if it does not."""
    level = 0
    for i in range(start, len(text)):
        level += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if level == 0:
            return i
    return -1


def _split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators outside of brackets; empty ones are left out."""
    parts, start, width = [], 0, len(separator)
    for i, level in _levels(text):
        if not level and i >= start and text.startswith(separator, i) and not _GROUPED.match(text, i):
            parts.append(text[start:i])
            start = i + width
    return [part.strip() for part in (*parts, text[start:]) if part.strip(" ,")]


# -- numbers --------------------------------------------------------------------------------------------------------

_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"-?\s*{_DECIMAL}"
_POWER = r"10\s*\^\s*\{?\s*(?P<power>[+-]?\s*[0-9]{1,4})\s*\}?"
_VALUE = re.compile(
    rf"(?P<currency>[{_CURRENCIES}]?)\s*(?P<sign>[+-]?)\s*(?P<currency2>[{_CURRENCIES}]?)\s*"
    rf"(?:{_POWER.replace('power', 'power2')}|"
    rf"(?:(?P<whole>[0-9]+)\s*)?\\frac\{{\s*(?P<top>{_SIGNED})\s*\}}\{{\s*(?P<bottom>{_SIGNED})\s*\}}"
    rf"|(?:(?P<whole2>[0-9]+)\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:\\(?:overline|bar)\s*\{{?(?P<cycle>[0-9]{{1,40}})\}}?)?(?:[eE](?P<e>[+-]?[0-9]{{1,4}}))?"
    rf"(?:\s*(?:\\times|\\cdot|\*|x)\s*{_POWER})?)"
)
_FUNCTION = re.compile(r"(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|mod|choose|arc|theta|alpha|beta)", re.IGNORECASE)
_PROSE = re.compile(r"[^\W\d_]+(?:[^\W\d_]|[\s,.'\":;-])*[^\W\d_]{2}(?:[^\W\d_]|[\s,.'\":;-])*[\s:-]")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_HEDGES = re.compile(
    r"\b(?:not|no|never|less|more|fewer|least|most|than|over|under|below|above|between|except|or|and|minus|plus|times|"
    r"squared|cubed|divided|half|twice|if|but|from|to|nor|without)\b",
    re.IGNORECASE,
)
_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
        "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
        "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week wk", "month": "month",
        "year": "year yr", "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "pound": "lb pound £",
        "oz": "oz ounce",
        "ml": "ml milliliter", "l": "l liter litre", "°": "° degree deg", "rad": "rad radian",
        "%": "% percent pct percentage", "dollar": "dollar usd ＄", "cent": "cent ¢", "euro": "euro €",
        "yen": "yen ¥", "am": "am", "pm": "pm", "mi/h": "mph", "km/h": "kph",
        "unit": "unit",
    }.items()
    for name in names.split()
}  # fmt: skip


def _read_number(text: str) -> MathNode | None:
    """A number, alone, with a unit behind it, or alone among words."""
    text = re.sub(r"\\text\{\s*\}", "", text).strip()
    bare = _TEXT_CONTENT.sub(r"\1", text)
    if (numeral := _read_numeral(bare)) is not None:
        return MathNode("number", text, value=numeral)
    numeral, _, unit = bare.rpartition(" ")
    if (value := _read_numeral(numeral)) is not None and (unit := _UNITS.get(unit) or _UNITS.get(unit[:-1])):
        return MathNode("number", text, value=value, unit=unit)
    if (twice := re.fullmatch(r"([^()]+)\(([^()]*)\)", text)) and re.match(r"[^\W\d_]{3}", twice[1]):
        number = _read_number(twice[2])  # `forty-two (42)`
        return number if number and _read_numeral(twice[1]) == number.value else None
    found = _VALUE.match(text)
    words = ""
    if not found:  # `She makes 18 a day`
        if not (found := re.search(_DECIMAL, text)) or re.search(r"[\\^_{}()\[\]*+/=<>|&]", text):
            return None
        words = text[: found.start()]
        if not _PROSE.fullmatch(words) or _HEDGES.search(words) or len(words.split()) > 12:
            return None
        found = _VALUE.match(text, found.start() - (words[-1] == "-"))
        if not found:
            return None
    value, rest = _evaluate(found), text[found.end() :]
    if value is None:
        return None
    if scale := re.match(r"\s*(?:\\text\{\s*)?(hundred|thousand|million|billion|trillion)\b(.*)", rest, re.IGNORECASE):
        value, rest = value * 10 ** _SCALES[scale[1].lower()], scale[2].rstrip("}") if "{" not in scale[2] else scale[2]
    unit = _read_unit(rest)
    if sign := found["currency"] or found["currency2"]:
        unit = None if unit is None else unit or _UNITS[sign]
    return None if unit is None else MathNode("number", text, value=value, unit=unit)


_NUMERALS = {
    name: value
    for names, values in {
        "one two three four five six seven eight nine": range(1, 10),
        "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen zero": (*range(10, 20), 0),
        "twenty thirty forty fifty sixty seventy eighty ninety": range(20, 100, 10),
    }.items()
    for name, value in zip(names.split(), values, strict=True)
}
_NAMES = list(_NUMERALS)
_BELOW_100 = rf"(?:(?:{'|'.join(_NAMES[20:])})(?:[ -](?:{'|'.join(_NAMES[:9])}))?|{'|'.join(_NAMES[19::-1])})"
_BELOW_1000 = rf"(?:{_BELOW_100} hundred(?: (?:and )?{_BELOW_100})?|{_BELOW_100})"
_NUMERAL = re.compile(rf"{_BELOW_1000}(?: (?:thousand|million|billion),?(?: (?:and )?{_BELOW_1000})?)*")


def _read_numeral(text: str) -> Fraction | None:
    """The number that English words say, such as `forty-two`."""
    text = " ".join(text.lower().split())
    if not _NUMERAL.fullmatch(text):
        return None
    total = hundreds = 0
    for word in re.findall(r"[a-z]+", text):
        if word == "hundred":
            hundreds *= 100
        elif word in _SCALES:
            total, hundreds = total + hundreds * 10 ** _SCALES[word], 0
        else:
            hundreds += _NUMERALS.get(word, 0)
    return Fraction(total + hundreds)


def _evaluate(found: re.Match[str]) -> Fraction | None:
    part = {name: text and text.replace(",", "").replace(" ", "") for name, text in found.groupdict().items()}
    exponent = int(part["e"] or 0) + int(part["power"] or part["power2"] or 0)
    if abs(exponent) > _EXPONENT:
        return None
    top, bottom = part["top"] or part["top2"], part["bottom"] or part["bottom2"]
    if top and bottom:
        if Fraction(bottom) == 0 or (top[0] == "-" and part["whole"]):
            return None
        value = Fraction(part["whole"] or part["whole2"] or 0) + Fraction(top) / Fraction(bottom)
    else:
        value = Fraction(part["decimal"] or 1)
        if cycle := part["cycle"]:  # `0.1\overline{6}`
            _, point, decimals = (part["decimal"] or "").partition(".")
            if not point:
                return None
            value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(decimals))
    value *= Fraction(10) ** exponent
    return -value if part["sign"] == "-" else value


def _read_unit(rest: str) -> str | None:
    """The unit in what follows a number: "" for none or one that is not known, None if it is no unit."""
    glued = rest[:1].isalpha()
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", rest)
    wrapped, text = text != rest, text.strip().rstrip(".")
    if not text:
        return ""
    if not re.fullmatch(
        r"[%°]?\s*[^\W\d_][^\d\\_=<>+*()\[\]{}|]*(?:\^\{?[23]\}?)?(?:/\s*[a-z]{1,6}(?:\^\{?2\}?)?)?|[%°¢＄€£¥]", text
    ):
        return None
    lowered = text.lower()
    power = {"2": 2, "3": 3}.get(re.sub(r"[^23]", "", lowered[lowered.find("^") :])[:1], 1) if "^" in lowered else 1
    power = 2 if re.match(r"sq(?:uare)?\b", lowered) else 3 if re.match(r"cu(?:bic)?\b", lowered) else power
    name = re.sub(r"^(?:sq(?:uare)?|cu(?:bic)?)\.?\s+|\^.*$", "", lowered).strip(" .")
    parts = [_UNITS.get(part) or _UNITS.get(part.removesuffix("s")) for part in re.split(r"\s*(?:/|\bper\b)\s*", name)]
    known = "/".join(part for part in parts if part) if all(parts) else None
    if known is None:
        first = re.match(r"[^\W\d_]*", text)
        letters = len(first[0]) if first else 0
        if _HEDGES.search(text) or _FUNCTION.match(text) or (not wrapped and letters < (4 if glued else 1)):
            return None
        if not wrapped and letters < 3 and not re.match(r"[^\W\d_]{1,2}\s+[^\W\d_]{2}", text):
            return None
        return ""
    if not wrapped and len(name) == 1 and name.isalpha():
        return None  # `5 m` is a product, `5\text{ m}` a length
    return f"{known}^{power}" if power > 1 else known


# -- comparison -----------------------------------------------------------------------------------------------------


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
    if _is_assignment(gold) and _is_assignment(predicted):
        return gold.parts[0].text == predicted.parts[0].text and _compare(gold.parts[1], predicted.parts[1], equal)
    if _is_assignment(predicted) and gold.kind != "relation":
        return _compare(gold, predicted.parts[1], equal)
    if _is_assignment(gold) and predicted.kind != "relation":
        return _compare(gold.parts[1], predicted, equal)
    if gold.kind == "list" and len(gold.parts) == 1:
        return _compare(gold.parts[0], predicted, equal)
    if predicted.kind == "list" and len(predicted.parts) == 1 and gold.kind != "number":
        return _compare(gold, predicted.parts[0], equal)
    if kinds & {"tuple", "union"} and kinds & {"relation", "list"}:
        one, other = _to_region(gold), _to_region(predicted)
        if one and other:
            return _compare(one, other, equal)
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
    if kinds == {"number", "expression"} and (gold.unit or predicted.unit):  # `5 m`, where metres are asked for
        one, other = (_read_letter_unit(node) for node in (gold, predicted))
        return one.unit == other.unit and _compare(one, other, equal)
    if gold.kind == "number":  # `2+2` does not pay for 4
        return False
    if gold.kind != predicted.kind:
        return kinds <= {"expression", "number", "words"} and equal([gold.text], [predicted.text], "")
    match gold.kind:
        case "tuple" | "matrix":
            return gold.text == predicted.text and _compare_in_order(gold.parts, predicted.parts, equal)
        case "union":
            return _match_all(gold.parts, predicted.parts, equal)
        case "ratio":
            return _compare_ratios(gold, predicted, equal)
        case "base" | "words":
            return gold.text == predicted.text
    return equal([gold.text], [predicted.text], "")


def _read_letter_unit(node: MathNode) -> MathNode:
    found = re.fullmatch(r"(.*[0-9.}])\s*([A-Za-z])((?:\^[23])?)", node.text)
    return (found and _read_number(rf"{found[1]}\text{{{found[2]}}}{found[3]}")) or node


def _compare_lists(gold: MathNode, predicted: MathNode, equal: ExpressionComparer) -> bool:
    named = [_are_assignments(node.parts) for node in (gold, predicted)]
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


def _to_region(node: MathNode) -> MathNode | None:
    """The interval or the union that relations of one variable say (`x < 1 or x > 5`, `x ≠ 0`); None for others."""
    if node.kind in ("tuple", "union"):
        return node
    relations = node.parts if node.kind == "list" else (node,)
    if not relations or any(one.kind != "relation" for one in relations):
        return None
    if len(relations) > 1 and len({p.text for one in relations for p in one.parts if _is_name(p.text)}) != 1:
        return None
    if all(one.text == "≠" and _is_name(one.parts[0].text) for one in relations):
        holes = sorted((one.parts[1] for one in relations), key=lambda hole: hole.value or 0)
        if len(holes) > 1 and any(hole.value is None for hole in holes):
            return None
        return MathNode(
            "union", "", tuple(MathNode("tuple", "()", ends) for ends in pairwise([_LOWEST, *holes, _HIGHEST]))
        )
    intervals = tuple(interval for one in relations if (interval := _to_interval(one)))
    if len(intervals) < len(relations):
        return None
    return intervals[0] if len(intervals) == 1 else MathNode("union", "", intervals)


def _to_interval(relation: MathNode) -> MathNode | None:
    """`a < x ≤ b` as the interval `(a, b]`; None for a relation that is none."""
    low, sign, high = None, relation.text, None
    if not set(sign) <= set("<≤"):
        return None
    names = [_is_name(part.text) for part in relation.parts]
    match len(relation.parts), names:
        case 3, [_, True, _]:
            low, high = relation.parts[0], relation.parts[2]
        case 2, [True, False]:
            low, high, sign = _LOWEST, relation.parts[1], "<" + sign
        case 2, [False, True]:
            low, high, sign = relation.parts[0], _HIGHEST, sign + "<"
    if low is None or high is None:
        return None
    brackets = ("(" if sign[0] == "<" else "[") + (")" if sign[1] == "<" else "]")
    return MathNode("tuple", brackets, (low, high))


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


def is_rounded(value: Fraction, decimal: str) -> bool:
    """Whether a decimal of six significant digits or more is the value, rounded to its last digit."""
    found = re.search(r"[0-9,]*\.([0-9]+)", decimal)
    if not found or len(re.sub(r"[^0-9]", "", found[0]).lstrip("0")) < _PRECISION:
        return False
    stated = Fraction(found[0].replace(",", ""))
    return abs(abs(value) - stated) <= Fraction(1, 2 * 10 ** len(found[1])) and (value < 0) == ("-" in decimal)


def _agree(first: str, second: str) -> bool:
    """Two units that are both known must be the same; others say nothing."""
    return first == second or not first or not second or "unit" in (first[:4], second[:4])
