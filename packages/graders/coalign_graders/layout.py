"""The layout of mathematical answers: one spelling for each character, sign, command, fraction and number.

`notation.py` finds the structure in what `simplify_notation` leaves. The checker's process loads this file by its path,
so it needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

LONGEST = 400  # characters of an answer; longer ones equal nothing but themselves

_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "⁄": "/", "∕": "/", "π": r"\pi ", "≡": r"\equiv ", "√": r"\sqrt ", "⟨": "(", "⟩": ")", "“": "", "”": "", "、": ", ",
    "。": ".", "∣": "|", "∫": r"\int ", "∑": r"\sum ", "∏": r"\prod ", "∧": r"\land ", "∨": r"\lor ", "¬": r"\neg ",
    "℃": "°C", "℉": "°F", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "\u3000": " ",
    "\u200b": "", "μ": "µ",
}  # fmt: skip
_SYMBOLS |= {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)}  # full-width letters, digits, signs
_GREEK = "α alpha β beta γ gamma δ delta ε epsilon θ theta λ lambda ρ rho σ sigma τ tau φ phi ω omega Δ Delta"
_SYMBOLS |= {letter: rf"\{name} " for letter, name in zip(_GREEK.split()[::2], _GREEK.split()[1::2], strict=True)}
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_LEVEL = {ord(character): "0123456789+-n"[i % 13] for i, character in enumerate(_RAISED + _LOWERED)}
ROW = "¶"  # between the rows of a matrix
_COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥",
    "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "approx": "≈", "simeq": "≈", "in": "∈",
    "cup": "∪", "pm": "±", "mp": "∓", "infty": "∞", "langle": "(", "rangle": ")", "lbrace": r"\{", "rbrace": r"\}",
    "degree": "°", "quad": " ", "qquad": " ", "left": "", "right": "", "big": "", "Big": "", "bigl": "", "bigr": "",
    "Bigl": "", "Bigr": "", "displaystyle": "", "boldsymbol": "", "mathbf": "", "limits": "", "land": " and ",
    "lor": " or ", "wedge": " and ", "vee": " or ", "colon": ":", "lvert": "|", "rvert": "|", "mid": "|", "ast": "*",
    "boxed": "", "fbox": "", "emptyset": "∅", "varnothing": "∅", "ldots": r"\dots", "cdots": r"\dots",
    "dotsc": r"\dots", "lg": r"\log_{10}", "pmod": r"\mod", "bmod": r"\mod", "lnot": r"\neg", "vert": "|",
}  # fmt: skip
_JOINTS = re.compile(r"^((?:and|or|,)\s)?([^|]*?)(\s(?:and|or)|,)?$")  # what joins a list: `12 \text{ boys and } 15`
_CONNECTIVES = ("land", "lor", "wedge", "vee")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|operatorname|rm|bf)\s*\{([^{}]*)\}")
_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_ENDS = r"[^\[\](){},;]+[,;][^\[\](){},;]+"  # the ends of an interval
_OUTWARD = re.compile(rf"\s*(?:[a-z]\s*∈\s*)?[\[\]]{_ENDS}[\[\]](?:\s*∪\s*[\[\]]{_ENDS}[\[\]])*\s*")
_NEARLY = re.compile(
    r"^(?:~|(?:\\text\{)?(?:about|approximately|approx\.?|around|roughly|nearly|almost)\b\s*\}?)\s*(?=\S)"
)


_DIGITS = {chr(code + 0xFEE0): chr(code) for code in (*range(0x30, 0x3A), *map(ord, "#.,:-+/%(){}"))}


def spell_digits(text: str) -> str:
    """A text with its full-width digits, and the signs that stand with digits, in ASCII; all else is as it was."""
    return text if text.isascii() else "".join(_DIGITS.get(character, character) for character in text)


def spell_characters(text: str) -> str:
    """A text with digits, letters and signs as ASCII or LaTeX has them: full-width ones, raised and lowered ones, ½."""
    text = re.sub(f"[{_RAISED}]+", lambda raised: "^{" + raised[0].translate(_LEVEL) + "}", text)
    text = re.sub(f"[{_LOWERED}]+", lambda lowered: "_{" + lowered[0].translate(_LEVEL) + "}", text)
    return "".join(character if character.isascii() else _spell(character) for character in text)


def _spell(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if unicodedata.decomposition(character).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKD", character).partition("⁄")
        return rf"\frac{{{top}}}{{{bottom or 1}}}"
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)


def simplify_notation(answer: str) -> str:
    r"""An answer without layout: one spelling for each sign, `\frac{a}{b}` for all fractions, words in `\text{}`."""
    text = spell_characters(answer[: 8 * LONGEST].strip())
    text = re.sub(r"\\\\(?:\s*\[[0-9.]+\s*[a-z]{2}\])?", ROW, text)
    text = re.sub(r"(?<=[0-9])(?:,\s*\\!\s*|\{,\})(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9])", ".", text)
    text = re.sub(r",\s*\\!\s*|\{,\}", ",", text).replace("{:}", ":")
    text = re.sub(r"(?<=,)\s*(?:\.\.\.|…)\s*(?=,|\\?\}|$)", r" \\dots ", text)
    text = re.sub(r"(?<=[0-9]\.)\(([0-9]{1,40})\)", r"\\overline{\1}", text)  # `0.(3)`
    text = re.sub(r"(\.[0-9]*?)([0-9])\2{2,}(?:\\[lc]?dots|\.\.\.|…)$", r"\1\\overline{\2}", text)  # `0.333…`
    text = re.sub(r"\\(?:operatorname|text|mathrm)\s*\{\s*cis\s*\}", r"\\cis ", text)
    text = re.sub(r"\\[()\[\]!]", "", text).replace(r"\$", "＄")
    text = re.sub(r"\\mathbb\s*(?:R|\{R\})", "ℝ", text)
    text = re.sub(r"\\[,;: ]|(?<=\S)~", " ", text).replace(r"\%", "%").replace("$", "")
    text = re.sub(r"\{([^{}]*)\\over(?![a-z])\s*([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\{\s*\\(?:rm|bf|it|tt)\s+([^{}]*)\}", r"\\text{\1}", text)
    text = _TEXT.sub(_unwrap, text)
    text = re.sub(r"(?:\\mu|µ)\s*\\text\{(?=[A-Za-z]+\})", r"\\text{µ", text)
    text = re.sub(r"µ(?![A-Za-z]+\})", r"\\mu ", text)
    text = _NEARLY.sub("≈", text)
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text, flags=re.IGNORECASE)
    text = _spell_commands(text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "°", text)
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text).replace("**", "").replace("`", "")
    text = text.replace("<=", "≤").replace(">=", "≥").replace("!=", "≠").replace("+∞", "∞").replace(r"\sqrt ", r"\sqrt")
    text = re.sub(r"([)\]}])\s*U\s*([(\[\\])", r"\1∪\2", text)
    text = re.sub(r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}", r"\\text{\1/\2}", text)
    text = _FRAC.sub(r"\\frac{\1\2}{\3\4}", text)
    text = re.sub(r"_\s*\{\s*\(\s*(\w+)\s*\)\s*\}", r"_{\1}", text)
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}(?![0-9])", r"\1\2", text)  # `2^{1}0` is not 2^10
    text = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)\b", "", text)
    text = re.sub(r"(?<=[)\]}0-9])\s*(or|and)\s*(?=[(\[{0-9\\-])", r" \1 ", text)
    text = re.sub(r"(?<=[0-9])\s*(?:\bto\b|\\text\{to\})\s*(?=[0-9])", ":", text)
    if _OUTWARD.fullmatch(text):
        text = re.sub(rf"[\[\]]({_ENDS})[\[\]]", _turn_brackets, text)
    text = re.sub(r"[,;]?\s*(?:\\text\{(?:where|for)\}\s*)?\(?\b[a-z]\s*∈\s*\\mathbb\s*\{?\s*Z\s*\}?\)?\s*$", "", text)
    return strip_braces(_join_digits(" ".join(text.split())).strip(" *").rstrip(".,;: "))


def _spell_commands(text: str) -> str:
    r"""`\land` joins relations as "and" does, but statements `p \land q` are no list."""
    is_logic = not re.search(r"[<>=≤≥≠∈0-9]|\\(?:[lg](?:e|eq|t)|neq?|in)\b", text)
    return re.sub(
        r"\\([A-Za-z]+)",
        lambda name: name[0] if is_logic and name[1] in _CONNECTIVES else _COMMANDS.get(name[1], name[0]),
        text,
    )


_COMMAS = re.compile(r"(?<![0-9.,^_])[0-9]+(?:,[0-9]+)+")
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")


def _join_digits(text: str) -> str:
    """A text without the commas that group digits: `1,000` is 1000 wherever it is not certain to be a list.

    It is one in brackets where no comma has a space behind it, unless an item would be `000`.
    """
    lists = _find_tight_lists(text)

    def join(run: re.Match[str]) -> str:
        is_padded = any(len(item) > 1 and item[0] == "0" for item in run[0].split(","))
        if is_padded or (run.start() not in lists and _GROUPED.fullmatch(run[0])):
            return _GROUPED.sub(lambda number: number[0].replace(",", ""), run[0])
        return run[0]

    return _COMMAS.sub(join, text)


def _find_tight_lists(text: str) -> set[int]:
    """The positions within brackets, not those of a command's argument, in which no space follows a comma."""
    bracket, brackets, loose = -1, [-1], {-1}
    within = []
    for i, character in enumerate(text):
        if character in ")]}" and len(brackets) > 1:
            bracket = (brackets.pop(), brackets[-1])[1]
        within.append(bracket)
        if character == ";" or text.startswith(", ", i):
            loose.add(bracket)
        if character in "([{":
            brackets.append(bracket := i)
            if character == "{" and text[i - 1 : i] != "\\":
                loose.add(i)
    return {i for i, bracket in enumerate(within) if bracket not in loose}


def levels(text: str) -> Iterator[tuple[int, int]]:
    """The positions of a text with the depth of brackets around them."""
    level = 0
    for i, character in enumerate(text):
        if character in ")]}":
            level = max(level - 1, 0)
        yield i, level
        if character in "([{":
            level += 1


def find_closing(text: str, start: int) -> int:
    """Where the bracket at ``start`` closes; -1 if it does not."""
    level = 0
    for i in range(start, len(text)):
        level += (text[i] in "([{") - (text[i] in ")]}")
        if level == 0:
            return i
    return -1


def strip_braces(text: str) -> str:
    while text.startswith("{") and find_closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _turn_brackets(match: re.Match[str]) -> str:
    """`]0, 1[` as (0, 1)."""
    return f"{'[' if match[0][0] == '[' else '('}{match[1]}{']' if match[0][-1] == ']' else ')'}"


def _unwrap(match: re.Match[str]) -> str:
    inside = match[1].strip(" ~")
    if inside.lower() == "mod":
        return r"\mod "
    if inside.lower() in ("and", "or", ",", ""):
        return f" {inside} "
    first, words, last = _JOINTS.sub(r"\1 |\2| \3", inside, count=1).split("|")
    return rf"{first.lstrip()}\text{{{words}}}{last.rstrip()}"


def write_key(text: str) -> str:
    r"""A text without the spaces that mean nothing: `1 2` is not 12, and `\sin x` not the command `\sinx`."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(\\[A-Za-z]+ (?=[A-Za-z]))|(?<![0-9])\s+|\s+(?![0-9])", lambda space: space[1] or "", text)
