"""Computes the integers of `$((…))`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b) if abs(a) < 2**53 and abs(b) < 2**53 else a // b,  # towards zero
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.LShift: lambda a, b: a << min(b, 64),
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Pow: lambda a, b: a ** min(b, 64),
}
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TERNARY = re.compile(r"(.+?)\?(.+):(.+)", re.DOTALL)


def compute(text: str, look_up: Callable[[str], str | None]) -> int | None:
    """Return the value of an expression; None if it needs a name that has no number. ``look_up`` returns values."""
    if (match := _TERNARY.fullmatch(text)) and text.count("?") == 1:
        chosen = compute(match[1], look_up)
        return None if chosen is None else compute(match[2] if chosen else match[3], look_up)
    python = text.replace("&&", " and ").replace("||", " or ").strip()
    try:
        tree = ast.parse(re.sub(r"!(?!=)", " not ", python), mode="eval")
        return int(_evaluate(tree.body, look_up))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _evaluate(node: ast.expr, look_up: Callable[[str], str | None]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(look_up(name) or "unknown")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner, look_up)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _evaluate(inner, look_up)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return int(not _evaluate(inner, look_up))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left, look_up), _evaluate(right, look_up))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](_evaluate(left, look_up), _evaluate(right, look_up)))
        case ast.BoolOp(op=op, values=values):
            results = [bool(_evaluate(value, look_up)) for value in values]
            return int(all(results) if isinstance(op, ast.And) else any(results))
    raise ValueError(f"no arithmetic: {ast.dump(node)}")
