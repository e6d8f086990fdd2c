"""Numbers as people write them: digits with separators, fractions, powers of ten, repeating decimals, words, units.

The checker's process loads this file by its path, so it needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_EXPONENT = 1000  # of ten; larger ones are not computed
_PRECISION = 6  # significant digits from which a decimal may stand for a value that has no end


class Quantity(NamedTuple):
    """A number and its unit: "" for none, and for one that is not known."""

    value: Fraction
    unit: str = ""


CURRENCIES = "＄€£¥"
TEXT_CONTENT = re.compile(r"\\text\{([^{}]*)\}")
GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"-?\s*{_DECIMAL}"
_POWER = r"10\s*\^\s*\{?\s*(?P<power>[+-]?\s*[0-9]{1,4})\s*\}?"
_VALUE = re.compile(
    rf"(?P<currency>[{CURRENCIES}]?)\s*(?P<sign>[+-]?)\s*(?P<currency2>[{CURRENCIES}]?)\s*"
    rf"(?:{_POWER.replace('power', 'power2')}|"
    rf"(?:(?P<whole>[0-9]+)\s*)?\\frac\{{\s*(?P<top>{_SIGNED})\s*\}}\{{\s*(?P<bottom>{_SIGNED})\s*\}}"
    rf"|(?:(?P<whole2>[0-9]+)\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:\\(?:overline|bar)\s*\{{?(?P<cycle>[0-9]{{1,40}})\}}?)?(?:[eE](?P<e>[+-]?[0-9]{{1,4}}))?"
    rf"(?:\s*(?:\\times|\\cdot|\*|x)\s*{_POWER})?)"
)
FUNCTION = re.compile(r"(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|mod|choose|arc|theta|alpha|beta)", re.IGNORECASE)
_PROSE = re.compile(r"[^\W\d_]+(?:[^\W\d_]|[\s,.'\":;-])*[^\W\d_]{2}(?:[^\W\d_]|[\s,.'\":;-])*[\s:-]")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
HEDGES = re.compile(
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


def read_quantity(text: str) -> Quantity | None:
    """A number, alone, with a unit behind it, or alone among words."""
    text = re.sub(r"\\text\{\s*\}", "", text).strip()
    bare = TEXT_CONTENT.sub(r"\1", text)
    if (numeral := read_numeral(bare)) is not None:
        return Quantity(numeral)
    numeral, _, unit = bare.rpartition(" ")
    if (value := read_numeral(numeral)) is not None and (unit := _UNITS.get(unit) or _UNITS.get(unit[:-1])):
        return Quantity(value, unit)
    if (twice := re.fullmatch(r"([^()]+)\(([^()]*)\)", text)) and re.match(r"[^\W\d_]{3}", twice[1]):
        number = read_quantity(twice[2])  # `forty-two (42)`
        return number if number and read_numeral(twice[1]) == number.value else None
    found = _VALUE.match(text)
    words = ""
    if not found:  # `She makes 18 a day`
        if not (found := re.search(_DECIMAL, text)) or re.search(r"[\\^_{}()\[\]*+/=<>|&]", text):
            return None
        words = text[: found.start()]
        if not _PROSE.fullmatch(words) or HEDGES.search(words) or len(words.split()) > 12:
            return None
        found = _VALUE.match(text, found.start() - (words[-1] == "-"))
        if not found:
            return None
    value, rest = _evaluate(found), text[found.end() :]
    if value is None:
        return None
    if scale := re.match(r"\s*(?:\\text\{\s*)?(hundred|thousand|million|billion|trillion)\b(.*)", rest, re.IGNORECASE):
        value, rest = value * 10 ** _SCALES[scale[1].lower()], scale[2].rstrip("}") if "{" not in scale[2] else scale[2]
    unit = read_unit(rest)
    if sign := found["currency"] or found["currency2"]:
        unit = None if unit is None else unit or _UNITS[sign]
    return None if unit is None else Quantity(value, unit)


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


def read_numeral(text: str) -> Fraction | None:
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


def read_unit(rest: str) -> str | None:
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
        if HEDGES.search(text) or FUNCTION.match(text) or (not wrapped and letters < (4 if glued else 1)):
            return None
        if not wrapped and letters < 3 and not re.match(r"[^\W\d_]{1,2}\s+[^\W\d_]{2}", text):
            return None
        return ""
    if not wrapped and len(name) == 1 and name.isalpha():
        return None  # `5 m` is a product, `5\text{ m}` a length
    return f"{known}^{power}" if power > 1 else known


def is_rounded(value: Fraction, decimal: str) -> bool:
    """Whether a decimal of six significant digits or more is the value, rounded to its last digit."""
    found = re.search(r"[0-9,]*\.([0-9]+)", decimal)
    if not found or len(re.sub(r"[^0-9]", "", found[0]).lstrip("0")) < _PRECISION:
        return False
    stated = Fraction(found[0].replace(",", ""))
    return abs(abs(value) - stated) <= Fraction(1, 2 * 10 ** len(found[1])) and (value < 0) == ("-" in decimal)
