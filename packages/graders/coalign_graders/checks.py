"""The checks that run in a process of their own, as a script (`checker.py` starts it): one JSON line in, one line out.

A check that takes more processor time than it was given ends the process.

Of the package it loads only what compares answers, by its path, so that it starts fast and needs little memory.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_NEEDS = {  # which modules import which
    "notation": ("layout", "quantity"),
    "region": ("notation",),
    "equality": ("region",),
}
_MEMORY = 4 << 30  # bytes of address space
_DIGITS = 400  # to which two values agree that are taken for the same, where neither is rational
# For free variables. Most problems mean positive ones; a modulus, a parity or a part shows at the others only.
_POINTS = tuple(
    tuple(map(Fraction, point.split()))
    for point in (
        *("0.7316 0.2971 1.3713", "17.6183 22.3607 5.7722", "4.1421 12.5992 20.9455"),
        *("2 3 5", "7 11 4", "6 8 9"),
        *("-1.618 2.236 -0.577", "3.162 -0.693 -2.718", "-2.5 -7.389 1.732", "-4 -3 6"),
    )
)
_INTEGER = re.compile(r"[kmnN]")  # variables that are integers where parities and parts of numbers are taken
_UNFINISHED = re.compile(r"\\(?:i*int|oint|sum|prod|lim|limsup|liminf|partial)(?![A-Za-z])|\\frac\{\s*d(?=[\s^}a-z])")
_FIGURE = re.compile(
    r"\\(?:angle|triangle|parallel|perp|cong|sim|to|mapsto)(?![a-z])|\\(?:vec|overrightarrow).*\\times"
)
_WORD = re.compile(  # several letters that are no command: `3 hours 20 minutes` is no product of variables
    r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|arc|mod|frac|text)+(?:[^A-Za-z]|$))[A-Za-z]{4,}"
)
_CIS = re.compile(r"\\cis\s*(\([^()]*\)|\\frac\{[^{}]*\}\{[^{}]*\}|\{[^{}]*\}|[0-9.]*°?(?:\\[a-z]+|[a-z])?)")


class AlgebraMissing(Exception):
    """An expression needs math-verify's parser, which is not installed."""


def check_math(gold: str, predicted: str) -> bool:
    """Whether two mathematical answers are equal."""
    return _load("equality").is_same(gold, predicted, _equal_expressions)


def check_literal(text: str) -> bool:
    """Whether a text is a Python literal that can be read within the limits."""
    ast.literal_eval(text)
    return True


def check_pattern(pattern: str, text: str) -> bool:
    """Whether a whole text matches a pattern of Python's re; a dot matches line ends too."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def find_last(pattern: str, text: str) -> str | None:
    """The first group of a pattern (without groups: all of it) where it matches last, ignoring case."""
    matches = [match[min(1, match.re.groups)] for match in re.finditer(pattern, text, re.IGNORECASE)]
    return matches[-1] if matches else None


CHECKS: dict[str, Callable[..., bool | str | None]] = {
    "math": check_math,
    "literal": check_literal,
    "pattern": check_pattern,
    "last": find_last,
}


@cache
def _load(name: str) -> ModuleType:
    """Load a module of this folder by its path, under its name in the package but without the package itself."""
    for needed in _NEEDS.get(name, ()):
        _load(needed)
    spec = importlib.util.spec_from_file_location(f"coalign.rewards.{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _equal_expressions(gold: Sequence[str], predicted: Sequence[str], relation: str) -> bool:
    """Compare expressions (one side each), equations or inequalities `<`, `≤` (two sides each) by their values."""
    if "latex2sympy2_extended" not in sys.modules:
        raise AlgebraMissing

    if any(_WORD.search(text) for text in (*gold, *predicted)):
        return False
    operators = [set(_UNFINISHED.findall(" ".join(one))) for one in (gold, predicted)]
    if not operators[1] <= operators[0]:  # an integral that only restates the problem
        return False
    sides = [[_parse(text) for text in one] for one in (gold, predicted)]
    if any(side is None for both in sides for side in both):
        return False
    if not relation:
        return _is_decimal(gold[0], predicted[0], sides) or _are_equal(sides[0][0], sides[1][0])
    first, second = (left - right for left, right in sides)
    return bool(first.free_symbols) and _are_proportional(first, second, relation == "<")


def _is_decimal(gold: str, predicted: str, sides: Sequence[Sequence[Any]]) -> bool:
    """Whether one of the two is a decimal that rounds the other, a constant."""
    for text, value in ((gold, sides[1][0]), (predicted, sides[0][0])):
        if re.fullmatch(r"-?\s*[0-9]*\.[0-9]+", text) and not value.free_symbols:
            exact = value.evalf(len(text) + 20)
            return bool(exact.is_Float) and _load("quantity").is_rounded(Fraction(str(exact)), text)
    return False


def _parse(text: str) -> Any:
    """An expression of sympy, with exact numbers; None for anything else."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    text = re.sub(r"\\text\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc|ln|log|exp|gcd|lcm|max|min)h?)\s*\}", r"\\\1 ", text)
    text = re.sub(r"\\text\{\s*([A-Za-z])\s*\}", r"\1", text)
    if r"\text" in text or _FIGURE.search(text):  # words and angles are no products of their letters
        return None
    if re.search(r"e\s*\^\s*\{?\s*\\log\s*_", text):  # the parser takes every logarithm there for the natural one
        return None
    if re.search(r"[0-9)]\s*_", text):  # a base that is a variable, which the parser would leave out
        return None
    text = re.sub(r"\\log\s*_\s*\{?e\}?", r"\\ln ", text)
    text = _CIS.sub(r"e^{i(\1)}", text)
    text = re.sub(r"([0-9.]+)°", r"(\\frac{\1\\pi}{180})", text)
    if "\\" not in text:  # plain notation: sqrt(3)/3, a * b
        text = re.sub(r"\bsqrt\(([^()]*)\)", r"\\sqrt{\1}", text).replace("*", r"\cdot ")
        text = re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)
        text = re.sub(r"\b(pi|sin|cos|tan|cot|sec|csc|log|ln|exp)\b", r"\\\1", text)
    text = re.sub(r"([\^_])([0-9]{2,})", r"\1{\2}", text)
    # Units have been read before, and case matters.
    layout = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
    )
    meaning = ConversionConfig(lowercase_symbols=False)
    expression = latex2sympy(normalize_latex(text, config=layout), normalization_config=None, conversion_config=meaning)
    if not isinstance(expression, sympy.Expr) or expression.has(sympy.nan, sympy.zoo):
        return None
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    return _take_real_roots(expression.xreplace(exact | {sympy.Symbol("i"): sympy.I}))


def _take_real_roots(expression: Any) -> Any:
    r"""An expression in which the odd root of a negative number is the real one, as `\sqrt[3]{-5}` means it."""
    import sympy

    roots = {}
    for power in expression.atoms(sympy.Pow):
        base, exponent = power.args
        if exponent.is_Rational and exponent.q % 2 and exponent.q > 1 and base.is_number and base.evalf(9).is_negative:
            roots[power] = (-1) ** (exponent.p % 2) * (-base) ** exponent
    return expression.xreplace(roots)


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two expressions have the same value at every point where both have one."""
    if first == second:
        return True
    if first.free_symbols != second.free_symbols:
        return False
    verdicts = [_is_zero(left - right) for left, right in _sample(first, second)]
    decided = [verdict for verdict in verdicts if verdict is not None]
    return all(decided) and len(decided) > (len(verdicts) > 1)


def _are_proportional(first: Any, second: Any, positive: bool) -> bool:
    """Whether one expression is a constant times the other, for an inequality a positive constant."""
    if first.free_symbols != second.free_symbols:
        return False
    zeros = [(pair, tuple(map(_is_zero, pair))) for pair in _sample(first, second)]
    values = [pair for pair, zero in zeros if zero == (False, False)]
    if len(values) < 2 or any(set(zero) == {True, False} for _, zero in zeros):
        return False
    first_value, second_value = values[0]
    if positive and not (first_value / second_value).evalf(9).is_positive:
        return False
    return all(_is_zero(left * second_value - right * first_value) for left, right in values[1:])


def _is_zero(value: Any) -> bool | None:
    """Whether a value is zero: exactly if it is rational, else to _DIGITS digits; None if it has no value."""
    near = value.evalf(15, maxn=60)
    if not near.is_number or not near.is_finite:
        return None
    if not _is_lost(near):
        return False
    value = value.doit()
    return value == 0 if value.is_Rational else _is_lost(value.evalf(15, maxn=_DIGITS))


def _is_lost(value: Any) -> bool:
    """Whether no digit of a value is certain: of a sum that cancels, sympy says how many digits are left."""
    return all(component == 0 or getattr(component, "_prec", 0) <= 2 for component in value.as_real_imag())


def _sample(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """The values of two expressions at the same points, one if they are constants."""
    import sympy

    symbols = sorted(first.free_symbols, key=str)
    stepwise = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.Sum, sympy.Product)
    signs = [power for both in (first, second) for power in both.atoms(sympy.Pow) if power.base.is_negative]
    integers = all(_INTEGER.fullmatch(str(symbol)) for symbol in symbols) and (signs or (first + second).has(*stepwise))
    for point in _POINTS if symbols else _POINTS[:1]:
        at = {
            s: sympy.Rational(point[i % 3]) + sympy.Rational(i // 3, 1 if point[0].denominator == 1 else 7)
            for i, s in enumerate(symbols)
        }
        if integers and not all(value.is_Integer for value in at.values()):
            continue
        if (
            min(at.values(), default=1) > 0
            or (_is_real(first, at) and _is_real(second, at))
            or (first + second).has(sympy.Abs)
        ):
            yield _take_real_roots(first.subs(at)), _take_real_roots(second.subs(at))


def _is_real(expression: Any, at: dict[Any, Any]) -> bool:
    """Whether all even roots and logarithms of an expression are of numbers that are not negative."""
    import sympy

    powers = [(power.base, power.exp.subs(at)) for power in expression.atoms(sympy.Pow)]
    bases = [base for base, exponent in powers if not exponent.is_Rational or exponent.q % 2 == 0]
    bases += [logarithm.args[0] for logarithm in expression.atoms(sympy.log)]
    return not any(base.subs(at).evalf(9).is_negative for base in bases)


def serve() -> None:
    """Answer each check as JSON, null if it raises an error, or with `missing` if it needs what is not installed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers, sys.stdout = sys.stdout, sys.stderr
    if sys.argv[1:] == ["algebra"]:
        import latex2sympy2_extended  # noqa: F401 - math-verify's parser
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        seconds, name, *arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, even within a C call
        try:
            answer = json.dumps(CHECKS[name](*arguments))
        except AlgebraMissing:
            answer = "missing"
        except Exception:  # what cannot be read equals nothing
            answer = "null"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(f"{answer}\n")
        answers.flush()


if __name__ == "__main__":
    serve()
