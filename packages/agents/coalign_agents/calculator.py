"""The calculator tool: evaluates arithmetic that is parsed, never run as Python."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, NoReturn

from pydantic import Field

from coalign.threads import parse_python

_MAX_NODES = 200
_MAX_NUMBER_BITS = 512  # intermediate results, too
_TOO_LARGE = "the number is too large"
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}


def calculator(
    expression: Annotated[str, Field(description="numbers, + - * / // % ** and parentheses, e.g. (3 + 4) * 12.5")],
) -> str:
    """Works out an arithmetic expression and returns the number."""
    value = evaluate(expression)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises ValueError for anything but arithmetic, and for numbers of too many digits."""
    for sign, usual in _SIGNS.items():
        expression = expression.replace(sign, usual)
    expression = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression).strip()  # 12,000
    if len(expression) > 5 * _MAX_NODES:
        raise ValueError("the expression is too long")
    try:
        tree = parse_python(expression, "eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an arithmetic expression: {expression[:80]!r}") from error
    if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
        raise ValueError("the expression is too long")
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool) and isinstance(node.value, int | float):
        if isinstance(node.value, float):
            return _check_size(Fraction(repr(node.value)) if math.isfinite(node.value) else _refuse(_TOO_LARGE))
        return _check_size(Fraction(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _check_size(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    _refuse(f"only numbers, + - * / // % ** and parentheses are known, not {ast.unparse(node)[:40]!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Exact for integer exponents, else rounded to a float; refuses before it computes a huge number."""
    if exponent.denominator != 1:
        if base < 0:
            _refuse("a negative number has no such power")
        try:
            return _check_size(Fraction(repr(float(base) ** float(exponent))))
        except (OverflowError, ValueError):
            _refuse(_TOO_LARGE)
    if base not in (0, 1, -1) and _bits(base) * abs(exponent) > 2 * _MAX_NUMBER_BITS:
        _refuse(_TOO_LARGE)
    return _check_size(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_size(value: Fraction) -> Fraction:
    return value if _bits(value) <= _MAX_NUMBER_BITS else _refuse(_TOO_LARGE)


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
