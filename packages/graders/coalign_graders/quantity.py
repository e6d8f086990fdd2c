"""Numbers as people write them: digits, fractions, powers of ten, repeating decimals, words, units, what is counted.

The checker's process loads this file by its path, so it needs only the standard library (`checks.py`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_MAX_EXPONENT = 1000  # larger powers of ten are not computed
_PRECISION = 6  # significant digits from which a decimal may stand for a value that has no end


class Quantity(NamedTuple):
    """A number and its unit: "" for none, and for one that is not known.

    ``noun`` are the words behind the number that are no known unit (`red balls`); ``label`` are all words that tell the
    number from another one of the same list, its unit among them.
    """

    value: Fraction
    unit: str = ""
    noun: frozenset[str] = frozenset()
    label: frozenset[str] = frozenset()


CURRENCIES = "＄€£¥"
TEXT_CONTENT = re.compile(r"\\text\{([^{}]*)\}")
_DECIMAL = r"(?:[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
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
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHARES = "third fourth fifth sixth seventh eighth ninth tenth"
_SCALES = {name: Fraction(number) for name, number in _LARGE.items()} | {"dozen": Fraction(12), "score": Fraction(20)}
_SCALES |= {name: Fraction(1, number) for number, name in enumerate(_SHARES.split(), 3)}
_SCALES |= {"half": Fraction(1, 2), "halve": Fraction(1, 2)}
_SCALES |= {f"{name}th": 1 / _SCALES[name] for name in ("hundred", "thousand", "million")}
_SHARE = re.compile(r"(quarter)s?", re.IGNORECASE)  # behind words only: `3 quarters` may be coins
_SCALE = re.compile(  # `5 thirds`, but not `5 third graders`
    rf"\s*(?:\\text\{{)?\s*(?:({'|'.join(_LARGE)}|dozen)\b|({'|'.join(_SCALES)})s?(?=\s*\}}?$))", re.IGNORECASE
)
_SCALES["quarter"] = Fraction(1, 4)
HEDGES = re.compile(
    r"\b(?:not|no|never|less|more|fewer|least|most|than|over|under|below|above|between|except|or|and|minus|plus|"
    r"times\s+(?!as\b|an?\b|per\b|in\b)|squared|cubed|divided|half|twice|if|but|from|to|nor|without|maybe|perhaps)\b",
    re.IGNORECASE,
)


def read_quantity(text: str) -> Quantity | None:
    """A number, alone, with a unit or what is counted behind it, or alone among words."""
    text = re.sub(r"\\text\{\s*\}", "", text).strip()
    text = re.sub(rf"^\\text\{{\s*([{CURRENCIES}]?-?[0-9.]+)([^{{}}]*)\}}", r"\1\\text{\2}", text).replace(
        r"\text{}", ""
    )
    text = re.sub(rf"^\\text\{{([^{{}}]*)\}}\s*(?=[{CURRENCIES}]?-?[0-9.])", r"\1 ", text)
    bare = TEXT_CONTENT.sub(r"\1", text)
    if (numeral := read_numeral(bare)) is not None:
        return Quantity(numeral)
    numeral, _, name = re.sub(r"-(?=[a-z]{4,}$)", " ", bare).rpartition(" ")
    if (value := Fraction(1) if numeral in ("a", "A") else read_numeral(numeral)) is not None:
        if scale := _SHARE.fullmatch(name) or _SCALE.fullmatch(name):
            return Quantity(value * _SCALES[(scale[1] or scale[2]).lower()])
        if unit := _name_unit(name):
            return Quantity(value, unit, label=frozenset([unit]))
    if (twice := re.fullmatch(r"([^()]+)\(([^()]*)\)", text)) and re.match(r"[^\W\d_]{3}", twice[1]):
        number = read_quantity(twice[2])  # `forty-two (42)`
        return number if number and read_numeral(twice[1]) == number.value else None
    match = _VALUE.match(text)
    words = ""
    if not match:  # `She makes 18 a day`
        if not (match := re.search(_DECIMAL, text)) or re.search(r"[\\^_{}()\[\]*+/=<>|&]", TEXT_CONTENT.sub("", text)):
            return None
        words = text[: match.start()]
        if not _PROSE.fullmatch(words) or HEDGES.search(words) or len(words.split()) > 12:
            return None
        match = _VALUE.match(text, match.start() - (words[-1] == "-"))
        if not match:
            return None
    value, rest = _evaluate(match), text[match.end() :]
    if value is None:
        return None
    if scale := _SCALE.match(rest):
        rest = rest[scale.end() :]
        value, rest = value * _SCALES[(scale[1] or scale[2]).lower()], rest if "{" in rest else rest.replace("}", "")
    unit = read_unit(rest)
    if unit is None:
        return None
    noun = frozenset[str]() if unit.strip("/") and unit[0] != "/" else read_words(rest)
    if sign := match["currency"] or match["currency2"]:
        unit = unit if unit and unit[0] != "/" else _UNITS[sign] + unit
    return Quantity(value, unit, noun, noun | read_words(words) | frozenset([unit] if unit else []))


def read_words(text: str) -> frozenset[str]:
    """The words that say what a number counts, in the singular; symbols of up to three letters as they are."""
    words = re.findall(r"[^\W\d_]+", TEXT_CONTENT.sub(r"\1", text))
    folded = [word if len(word) < 4 else re.sub(r"(?<!s)s$", "", word.casefold()) for word in words]
    return frozenset(word for word in folded if word.casefold() not in _FILLERS.split())


_FILLERS = (
    "a an and are at be by each for get gets given had has have her his in is it its made make makes need of on our "
    "per she he them the their there these they this we were will with you your unit total time way "
    "ways day different distinct possible such exactly altogether overall"
)
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
        elif word in _LARGE:
            total, hundreds = total + hundreds * _LARGE[word], 0
        else:
            hundreds += _NUMERALS.get(word, 0)
    return Fraction(total + hundreds)


def _evaluate(match: re.Match[str]) -> Fraction | None:
    groups = {name: text and text.replace(" ", "") for name, text in match.groupdict().items()}
    exponent = int(groups["e"] or 0) + int(groups["power"] or groups["power2"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    top, bottom = groups["top"] or groups["top2"], groups["bottom"] or groups["bottom2"]
    if top and bottom:
        if Fraction(bottom) == 0 or (top[0] == "-" and groups["whole"]):
            return None
        value = Fraction(groups["whole"] or groups["whole2"] or 0) + Fraction(top) / Fraction(bottom)
    else:
        value = Fraction(groups["decimal"] or 1)
        if cycle := groups["cycle"]:  # `0.1\overline{6}`
            _, point, decimals = (groups["decimal"] or "").partition(".")
            if not point:
                return None
            value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(decimals))
    value *= Fraction(10) ** exponent
    return -value if groups["sign"] == "-" else value


# -- units ----------------------------------------------------------------------------------------------------------

_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm", "cm": "cm", "m": "m", "km": "km", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard",
        "mi": "mi mile", "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week wk",
        "month": "month", "year": "year yr", "ms": "ms", "nm": "nm", "mg": "mg", "g": "g", "kg": "kg",
        "pound": "lb pound £", "oz": "oz ounce",
        "ml": "ml", "l": "l", "gal": "gal gallon", "qt": "qt quart", "pt": "pint", "acre": "acre", "ha": "ha hectare",
        "ton": "ton", "t": "tonne", "°": "° degree deg", "rad": "rad radian", "°c": "°c celsius degreescelsius",
        "°f": "°f fahrenheit degreesfahrenheit", "%": "% percent pct percentage", "dollar": "dollar usd ＄",
        "cent": "cent ¢", "euro": "euro €", "yen": "yen ¥", "rupee": "rupee", "am": "am", "pm": "pm", "mi/h": "mph",
        "km/h": "kph", "unit": "unit",
    }.items()
    for name in names.split()
}  # fmt: skip
_SYMBOLS = {  # units that take prefixes
    "metre": "m", "meter": "m", "gram": "g", "litre": "l", "liter": "l", "newton": "N", "joule": "J", "watt": "W",
    "volt": "V", "ampere": "A", "amp": "A", "ohm": "Ω", "hertz": "Hz", "pascal": "Pa", "kelvin": "K", "mole": "mol",
    "byte": "B", "bit": "bit", "calorie": "cal", "second": "s",
}  # fmt: skip
_PREFIXES = {"kilo": "k", "mega": "M", "giga": "G", "tera": "T", "milli": "m", "micro": "µ", "nano": "n", "centi": "c"}
_SYMBOL = re.compile(
    rf"[{''.join(_PREFIXES.values())}K]?(?:{'|'.join({*_SYMBOLS.values()} - {'m', 'g', 'l', 's'})})|µ[mgls]"
)
_LONG_NAME = re.compile(rf"({'|'.join(_PREFIXES)})?({'|'.join(_SYMBOLS)})s?")


def _name_unit(name: str) -> str | None:
    """The unit that a name or a symbol stands for; None if it is not known."""
    if _SYMBOL.fullmatch(name):
        return "k" + name[1:] if len(name) > 1 and name[0] == "K" else name
    lowered = name.lower()
    if spelled := _LONG_NAME.fullmatch(lowered):
        return _PREFIXES.get(spelled[1], "") + _SYMBOLS[spelled[2]]
    return _UNITS.get(lowered) or _UNITS.get(lowered.removesuffix("s"))


def read_unit(rest: str) -> str | None:
    """The unit in what follows a number: "" for none or one that is not known, None if it is no unit.

    `/day` is a rate whose numerator is not known.
    """
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
    name = re.sub(r"^(?:sq(?:uare)?|cu(?:bic)?)\.?\s+|\^.*$", "", text, flags=re.IGNORECASE).strip(" .")
    name = re.sub(r"\bper\s+cent\b", "percent", name)
    name = re.sub(r"(°|(?i:degrees?))\s*(?=[CF]|(?i:celsius|fahrenheit)\b)", lambda one: "°", name)
    name = re.sub(r"°(?i:(c)elsius|(f)ahrenheit)", lambda one: "°" + (one[1] or one[2]), name)
    units = [_name_unit(piece.strip()) or "" for piece in re.split(r"\s*(?:/|\bper\b)\s*", name)]
    if any(units) and all(units[1:]):
        if not units[0] and not re.search(r"\bper\b|/", name):
            return None
        if not wrapped and len(name) == 1 and name.isalpha():
            return None  # `5 m` is a product, `5\text{ m}` a length
        unit = "/".join(units)
        return f"{unit}^{power}" if power > 1 else unit
    first = re.match(r"[^\W\d_]*", text)
    letters = len(first[0]) if first else 0
    if HEDGES.search(text) or FUNCTION.match(text) or (not wrapped and letters < (4 if glued else 1)):
        return None
    if not wrapped and letters < 3 and not re.match(r"[^\W\d_]{1,2}\s+[^\W\d_]{2}", text):
        return None
    return ""


def is_rounded(value: Fraction, decimal: str) -> bool:
    """Whether a decimal of six significant digits or more is the value, rounded to its last digit."""
    match = re.search(r"[0-9]*\.([0-9]+)", decimal)
    if not match or len(re.sub(r"[^0-9]", "", match[0]).lstrip("0")) < _PRECISION:
        return False
    stated = Fraction(match[0])
    return abs(abs(value) - stated) <= Fraction(1, 2 * 10 ** len(match[1])) and (value < 0) == ("-" in decimal)
