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
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_NEEDS = {"notation": ("quantity",), "region": ("notation",), "equality": ("region",)}  # which modules import which
_MEMORY = 4 << 30  # bytes of address space
_DIGITS = 40  # of the values at which two expressions are compared
_NEAR = 1e-25  # relative difference of values that are the same
# Variables are positive, as in most problems, except where a modulus would not show otherwise.
_POINTS = ((0.7316, 0.2971, 1.3713), (17.6183, 22.3607, 5.7722), (4.1421, 12.5992, 20.9455))  # for free variables
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
    found = [match[min(1, match.re.groups)] for match in re.finditer(pattern, text, re.IGNORECASE)]
    return found[-1] if found else None


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
    import sympy

    sides = [[_parse(text) for text in one] for one in (gold, predicted)]
    if any(side is None for both in sides for side in both):
        return False
    if not relation:
        one, other = sides[0][0], sides[1][0]
        imaginary = {sympy.Symbol("i"): sympy.I}
        return (
            _is_decimal(gold[0], predicted[0], sides)
            or _are_equal(one, other)
            or _are_equal(one.subs(imaginary), other.subs(imaginary))
        )
    first, second = (left - right for left, right in sides)
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    signs = (1, -1) if _has_modulus(first) or _has_modulus(second) else (1,)
    values = [both for sign in signs for both in zip(_sample(first, sign), _sample(second, sign), strict=False)]
    if not values or any(abs(b) < _NEAR or abs(a) < _NEAR for a, b in values):
        return False
    ratios = [a / b for a, b in values]
    if not all(abs(ratio - ratios[0]) <= _NEAR * abs(ratios[0]) for ratio in ratios):
        return False
    return relation == "=" or (abs(ratios[0].imag) < _NEAR and ratios[0].real > 0)


def _is_decimal(gold: str, predicted: str, sides: Sequence[Sequence[Any]]) -> bool:
    """Whether one of the two is a decimal that rounds the other, a constant."""
    for text, value in ((gold, sides[1][0]), (predicted, sides[0][0])):
        if re.fullmatch(r"-?\s*[0-9,]*\.[0-9]+", text) and not value.free_symbols:
            exact = value.evalf(_DIGITS)
            return bool(exact.is_Float) and _load("quantity").is_rounded(Fraction(str(exact)), text)
    return False


def _parse(text: str) -> Any:
    """An expression of sympy, with exact numbers; None for anything else."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if re.search(r"[0-9)]\s*_", text):  # a base that is a variable, which the parser would leave out
        return None
    text = _CIS.sub(r"e^{i(\1)}", text)
    text = re.sub(r"([0-9.]+)°", r"{\\frac{\1\\pi}{180}}", text)
    if "\\" not in text:  # plain notation: sqrt(3)/3, a * b
        text = re.sub(r"\bsqrt\(([^()]*)\)", r"\\sqrt{\1}", text).replace("*", r"\cdot ")
        text = re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)
        text = re.sub(r"\b(pi|sin|cos|tan|cot|sec|csc|log|ln|exp)\b", r"\\\1", text)
    text = re.sub(r"\^([0-9]{2,})", r"^{\1}", text)
    # Units have been read before, and case matters.
    layout = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
    )
    meaning = ConversionConfig(lowercase_symbols=False)
    found = latex2sympy(normalize_latex(text, config=layout), normalization_config=None, conversion_config=meaning)
    if not isinstance(found, sympy.Expr) or found.has(sympy.nan, sympy.zoo):
        return None
    return found.xreplace({number: sympy.Rational(str(number)) for number in found.atoms(sympy.Float)})


def _are_equal(first: Any, second: Any) -> bool:

    if first == second:
        return True
    if first.free_symbols != second.free_symbols:
        return False
    signs = (1, -1) if _has_modulus(first) or _has_modulus(second) else (1,)
    for sign in signs:
        values = list(zip(_sample(first, sign), _sample(second, sign), strict=False))
        if not values or any(abs(a - b) > _NEAR * max(abs(a), abs(b)) for a, b in values):
            return False
    return True


def _has_modulus(expression: Any) -> bool:
    """Whether an expression holds `|x|`, or the root of a square, which is one."""
    import sympy

    roots = (power.base for power in expression.atoms(sympy.Pow) if power.exp.is_Rational and power.exp.q == 2)
    return expression.has(sympy.Abs) or any(base.is_Pow and base.exp.is_even for base in roots)


def _sample(expression: Any, sign: int = 1) -> list[Any]:
    """The values of an expression at fixed points, one if it is a constant; none if it has no value there."""
    import mpmath
    import sympy

    mpmath.mp.dps = _DIGITS
    symbols = sorted(expression.free_symbols, key=str)
    values = []
    for point in _POINTS[: len(_POINTS) if symbols else 1]:
        at = {s: sign * (sympy.Rational(str(point[i % 3])) + sympy.Rational(i // 3, 7)) for i, s in enumerate(symbols)}
        value = expression.subs(at).evalf(_DIGITS, maxn=400)
        if not value.is_number or not value.is_finite:
            return []
        values.append(mpmath.mpmathify(value))
    return values


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
