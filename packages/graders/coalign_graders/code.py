"""The code reward: runs the code of a response in a sandbox (coalign_graders.sandbox) and counts the tests it passes.

A value that is compared with a constant is judged here, outside of the sandbox: the code computes the value and never
sees the constant, so printing, exiting, overloading `==` or rebinding built-ins cannot pass it.

Any other statement runs in the code's own process, which returns a secret number at the end. Code that tampers with the
interpreter can find that number, so such a test is ``forgeable``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import keyword
import math
import operator
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from coalign_graders.answers import remove_thoughts
from coalign_graders.box_types.config import SandboxConfig
from coalign_graders.box_types.python_box import PythonBox
from coalign_graders.checker import parse_python, read_literal
from coalign_graders.processors import count_processors
from coalign_graders.sample import GradedSample
from coalign_graders.sandbox.sandbox import REQUIREMENTS, Sandbox, SandboxLimits, SandboxResult, require_limits

_QUOTE = re.compile(r"(?:[ \t]*+>)++ ?")
# Behind blanks, marks of quotation and of list items. Possessive, so that a long line of blanks is looked at once.
_FENCE = re.compile(r"(?:[ \t]|>|[-*+][ \t]|[0-9]{1,9}[.)][ \t])*+(`{3,}+|~{3,}+)[ \t]*+([^`]*+)$")


async def code(
    sample: GradedSample,
    *,
    tests_key: str = "tests",
    entry_key: str = "entry_point",
    partial: bool = True,
    seconds: float = 5.0,
    total_seconds: float = 20.0,
    memory_mb: int = 512,
    processes: int = 1,
    output_kb: int = 256,
    file_mb: int = 16,
    packages: bool = True,
    require: Sequence[str] = REQUIREMENTS,
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    """The share of the row's tests that the code passes; with ``partial: false`` 1.0 for all of them, else 0.0.

    The code is the last block of the response (after ``</think>``) that is marked as Python, else the last block, else
    the whole response. ``row[tests_key]`` is one of these, or JSON text of it:

    - a list of `assert` statements;
    - a test program as one text; if it defines `check`, as HumanEval does, `check(row[entry_key])` is called at its
      end;
    - cases of standard input and output, `[{input: …, output: …}]` or `{inputs: […], outputs: […]}`, compared without
      regard to whitespace; with `fn_name` in the latter, arguments and results of that function or `Solution` method;
    - LiveCodeBench's cases with `testtype: functional`, each of whose lines is an argument as JSON. The function is
      `func_name` in the case, in its `metadata` or in the row's, or ``row[entry_key]``.

    Each test is a process of its own with ``seconds`` of wall-clock time. Tests not begun within ``total_seconds`` have
    failed (keep both together below the reward's `timeout`). SandboxLimits describes the other limits. ``packages``
    allows imports of installed packages. ``require`` lists what this machine must be able to limit; to ask for less is
    a risk. With ``sandbox`` each test is a process of Python in a box of its own, which that limits in place of
    ``memory_mb``, ``processes``, ``file_mb`` and ``require``.

    Also logs `solved` (1.0 if all passed), `timed_out` (1.0 if a test ran out of time) and `forgeable`, the share of
    the row's tests that are judged beside the code. Raises KeyError or ValueError for a row without usable tests,
    LimitNotEnforceable if this machine cannot keep what is required, and SandboxError if the sandbox itself fails.
    """
    tests = read_tests(_tests(sample, tests_key), sample.meta.get(entry_key) or _read_name(sample.meta.get("metadata")))
    limits = SandboxLimits(seconds, memory_mb, processes, output_kb, file_mb)
    if sandbox is None:
        await asyncio.to_thread(require_limits, tuple(require), processes)
        context = Sandbox(limits, packages=packages)
    else:
        context = nullcontext(PythonBox(sandbox, limits, packages=packages))
    source, passed, timed_out = extract_code(sample.response, sample.prompt), 0, False
    started_at = time.monotonic()
    async with context as runner:
        for test in tests:
            if time.monotonic() - started_at > total_seconds:
                timed_out = True
                break
            report = await runner.run(test.prepare(source), **test.request)
            passed += await asyncio.to_thread(test.passes, report)  # a second, if the code made its answer for that
            timed_out |= report.ended == "seconds"
            if not partial and not passed:
                break
    solved = float(passed == len(tests))
    return {
        "reward": passed / len(tests) if partial else solved,
        "solved": solved,
        "timed_out": float(timed_out),
        "forgeable": sum(test.forgeable for test in tests) / len(tests),
    }


code.at_once = count_processors()  # more would slow each other down


def extract_code(response: str, prompt: str = "") -> str:
    """The program in a response; a block that never closes goes to the end. ``prompt``: it may open a thought."""
    text = remove_thoughts(response, prompt)
    blocks = _read_blocks(text)
    marked = [body for language, body in blocks if language.lower().lstrip("{.").startswith("py")]
    return (marked or [body for _, body in blocks] or [text])[-1]


def _read_blocks(text: str) -> list[tuple[str, str]]:
    """The language and the content of each fenced block, without the marks and blanks of what it stands in."""
    blocks: list[tuple[str, list[str]]] = []
    opening, indent = "", 0
    lines = text.split("\n")
    for i, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        if opening and not (fence and fence[1].startswith(opening) and _measure_indent(line) < indent + 4):
            blocks[-1][1].append(line + "\n" * (i + 1 < len(lines)))
        elif fence and (fence[2].strip() or not opening):  # a block whose end was forgotten ends at the next one
            opening, indent = fence[1], _measure_indent(line)
            blocks.append((fence[2].partition(" ")[0].strip(), []))
        else:
            opening = ""
    return [(language, _remove_margin(body)) for language, body in blocks]


def _measure_indent(line: str) -> int:
    quote = _QUOTE.match(line)
    bare = line[quote.end() :] if quote else line
    return len(bare) - len(bare.lstrip(" \t"))


def _remove_margin(lines: list[str]) -> str:
    """Lines without the marks of quotation and the blanks that all of them begin with."""
    if all(_QUOTE.match(line) for line in lines if line.strip()):
        lines = [_QUOTE.sub("", line, count=1) for line in lines]
    margin = min((len(line) - len(line.lstrip(" \t")) for line in lines if line.strip()), default=0)
    return "".join(line[margin:] if line.strip() else line for line in lines)


def _tests(sample: GradedSample, key: str) -> Any:
    if sample.meta.get(key) is None:
        raise KeyError(f"the row has no tests in '{key}'; it has {sorted(sample.meta)} (set tests_key)")
    return sample.meta[key]


_CLOSE = 1e-6  # relative or absolute difference of floating-point numbers that count as equal
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (set, frozenset, tuple, list, sorted, dict, float)
}
_UNREADABLE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)  # what ast.literal_eval may raise

ValueCheck = Callable[[Any], Any]  # whether a value is right, by its truth
_Split = list[tuple[ast.expr, ValueCheck]]  # what the sandbox has to evaluate, with the check of each value


@dataclass(frozen=True)
class CodeTest:
    """What to run, and whether its result means that the test passed."""

    request: Mapping[str, str]  # arguments of Sandbox.run
    passes: Callable[[SandboxResult], bool]
    forgeable: bool = False  # something of it is judged beside the code
    prelude: str = ""  # statements that the code may rely on

    def prepare(self, source: str) -> str:
        """The code behind what it may rely on; imports from the future stay the first."""
        return source if "__future__" in source else self.prelude + source


def read_tests(source: Any, entry: str | None = None) -> list[CodeTest]:
    """Parse tests in any of the forms that ``code`` takes. ValueError for other forms and for no tests."""
    try:
        tests = _read(source, entry)
    except RecursionError:
        raise ValueError("the row's tests are nested too deeply") from None
    if not tests:
        raise ValueError("the row's tests are empty, so there is nothing to reward")
    return tests


def _read(source: Any, entry: str | None) -> list[CodeTest]:
    if isinstance(source, str):
        if not source.lstrip().startswith(("[", "{")):
            has_check = entry and re.search(r"^def check\(", source, re.MULTILINE)
            return [
                _statement_test(f"{source}\ncheck({entry})\n" if has_check else source, "check" if has_check else "")
            ]
        source = json.loads(source)
    if isinstance(source, Mapping) and _is_list(source.get("inputs")) and _is_list(source.get("outputs")):
        cases = list(zip(source["inputs"], source["outputs"], strict=True))
        name = source.get("fn_name")
        return [_wrapped_test(name, *case) if name else _output_test(*case) for case in cases]
    if _is_list(source) and all(isinstance(one, str) for one in source):
        return [_statement_test(text) for text in source]
    if _is_list(source) and all(isinstance(one, Mapping) and {"input", "output"} <= set(one) for one in source):
        return [_read_case(case, entry) for case in source]
    raise ValueError(
        f"tests are {source!r:.80}; expected a list of assert statements, a test program, cases with `input` and "
        "`output`, or `inputs`, `outputs` and perhaps `fn_name`"
    )


def _is_list(value: Any) -> TypeGuard[Collection[Any]]:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _read_case(case: Mapping[str, Any], entry: str | None) -> CodeTest:
    """A case of standard input and output, or one of LiveCodeBench that calls a function."""
    type_ = case.get("testtype", "stdin")
    if type_ in ("stdin", None):
        return _output_test(case["input"], case["output"])
    if type_ != "functional":
        raise ValueError(f"a test's testtype is {type_!r:.80}; expected `stdin` or `functional`")
    name = case.get("func_name") or case.get("fn_name") or _read_name(case.get("metadata")) or entry
    if not name:
        raise ValueError("a test has testtype: functional, and neither it nor the row's `metadata` has a `func_name`")
    try:
        arguments, expected = case["input"], case["output"]
        if isinstance(arguments, str):
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        return _call_test(name, arguments, json.loads(expected) if isinstance(expected, str) else expected)
    except json.JSONDecodeError as error:
        raise ValueError(f"a test of {name} is {dict(case)!r:.200}; expected JSON: {error}") from None


def _read_name(metadata: Any) -> str | None:
    """`func_name` of LiveCodeBench's metadata, a mapping or its JSON text."""
    if isinstance(metadata, str):
        with suppress(ValueError):
            metadata = json.loads(metadata)
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _output_test(stdin: Any, expected: Any) -> CodeTest:
    lines, words = _to_text(stdin), _to_text(expected).split()
    return CodeTest({"stdin": lines}, lambda report: report.ended == "exit 0" and report.output.split() == words)


def _to_text(value: Any) -> str:
    return "\n".join(map(str, value)) if _is_list(value) else str(value)


# What signatures and solutions of LeetCode's problems take for given; the built-in `pow` is not that of math.
_MODULES = ("typing", "collections", "heapq", "bisect", "itertools", "functools", "math", "builtins")
_PRELUDE = f"import {', '.join(_MODULES)}\n" + "".join(f"from {module} import *\n" for module in _MODULES)


def _wrapped_test(name: Any, arguments: Any, expected: Any) -> CodeTest:
    """A call whose result may stand in a list of its own, as APPS has it."""
    return _call_test(
        name, arguments, expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ())
    )


def _call_test(name: Any, arguments: Any, *expected: Any) -> CodeTest:
    """A call of a function, or of a method of `Solution`, that gives one of the ``expected`` results."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"fn_name is {name!r:.80}; expected the name of a function")
    if not _is_list(arguments):
        raise ValueError(f"an input of {name} is {arguments!r:.80}; expected the list of its arguments")
    call = f"(globals().get({name!r}) or Solution().{name})(*{list(arguments)!r})"
    test = _judged_test(f"__answer__({call})", [lambda value: any(_is_same(value, one) for one in expected)])
    return replace(test, prelude=_PRELUDE)


def _statement_test(text: str, function: str = "") -> CodeTest:
    """Statements: the asserts that always run (at the top, and in ``function``) are judged outside if they can be."""
    checks: list[ValueCheck] = []
    try:
        tree = parse_python(text)
        _take_asserts(tree, checks)
        for node in tree.body:
            may_leave = any(isinstance(inner, ast.Return) for inner in ast.walk(node))
            if isinstance(node, ast.FunctionDef) and node.name == function and not may_leave:
                _take_asserts(node, checks)
        if checks:
            forgeable = any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree))
            return _judged_test(ast.unparse(ast.fix_missing_locations(tree)), checks, forgeable)
    except _UNREADABLE:
        pass
    return _judged_test(text, [], forgeable=True)


def _judged_test(statements: str, checks: list[ValueCheck], forgeable: bool = False) -> CodeTest:
    """A test whose statements hand over one value for each check."""
    token = secrets.token_hex(16)

    def passes(report: SandboxResult) -> bool:
        if not report.answer.startswith(token):
            return False
        try:
            values = read_literal(report.answer.removeprefix(token))
            return len(values) == len(checks) and all(check(one) for check, one in zip(checks, values, strict=True))
        except (*_UNREADABLE, OverflowError):  # no literals, or of types that cannot be compared so
            return False

    return CodeTest({"test": statements, "token": token}, passes, forgeable)


def _take_asserts(block: ast.Module | ast.FunctionDef, checks: list[ValueCheck]) -> None:
    """Replace asserts of the block by calls that hand over their values, whose checks go to ``checks``."""
    body: list[ast.stmt] = []
    for statement in block.body:
        split = _split(statement.test) if isinstance(statement, ast.Assert) else None
        if split is None:
            body.append(statement)
            continue
        for value, check in split:
            body.append(ast.Expr(ast.Call(ast.Name("__answer__", ast.Load()), [value], [])))
            checks.append(check)
    block.body = body or [ast.Pass()]


def _split(condition: ast.expr) -> _Split | None:
    """The values on which the condition depends, with their checks; None if it needs more than constants and them."""
    match condition:
        case ast.Constant(value=value) if value:
            return []
        case ast.BoolOp(op=ast.And(), values=conditions):
            splits = list(map(_split, conditions))
            return None if None in splits else [one for split in splits if split for one in split]
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _split_comparison([_COMPARISONS.get(type(op)) for op in ops], [left, *others])
        case ast.Call(
            func=ast.Name(id="isclose") | ast.Attribute(value=ast.Name(id="math"), attr="isclose"),
            args=[value, second],
            keywords=options,
        ) if _is_value(value):
            try:
                expected, limits = _constant(second), {str(one.arg): _constant(one.value) for one in options}
            except _UNREADABLE:
                return None
            return [(value, lambda value: math.isclose(value, expected, **limits))]
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as value) if _is_plain_call(value):
            return [(_truth(value), operator.not_)]
        case ast.Call() if _is_plain_call(condition):
            return [(_truth(condition), bool)]
    return None


def _split_comparison(operators: list[Callable[[Any, Any], Any] | None], operands: list[ast.expr]) -> _Split | None:
    """`f(1) == 2`, `0 < f(1) <= 1`, `abs(f(1) - 0.5) < 1e-6`: any comparison of one value with constants."""
    constants, positions = [], []
    for position, operand in enumerate(operands):
        try:
            constants.append(_constant(operand))
        except _UNREADABLE:
            constants.append(None)
            positions.append(position)
    if len(positions) != 1 or None in operators:
        return None
    (position,) = positions
    value, measure = _take_distance(operands[position])
    # What `is` holds of is another object here, except for the few that exist once.
    by_identity = any(one in (operator.is_, operator.is_not) for one in operators)
    if not _is_value(value) or (by_identity and any(one not in (None, True, False) for one in constants)):
        return None

    def check(value: Any) -> bool:
        row = [*constants[:position], measure(value), *constants[position + 1 :]]
        return all(one and one(left, right) for one, left, right in zip(operators, row[:-1], row[1:], strict=True))

    return [(value, check)]


def _take_distance(node: ast.expr) -> tuple[ast.expr, Callable[[Any], Any]]:
    """`abs(f(1) - 2)` as f(1) and the distance from 2, any other expression as it is."""
    match node:
        case ast.Call(
            func=ast.Name(id="abs" | "fabs") | ast.Attribute(value=ast.Name(id="math"), attr="fabs"),
            args=[ast.BinOp(left=left, op=ast.Sub(), right=right)],
            keywords=[],
        ):
            for value, constant in ((left, right), (right, left)):
                with suppress(*_UNREADABLE):
                    return value, partial(lambda truth, result: abs(truth - result), _constant(constant))
    return node, lambda value: value


def _constant(node: ast.expr) -> Any:
    """The value of a literal, or of a container, sorted list or float made from one. ValueError for anything else."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[] | [_] as arguments, keywords=[]) if name in _CONSTRUCTORS:
            return _CONSTRUCTORS[name](*map(_constant, arguments))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Call() as number):
            return -_constant(number)
    return ast.literal_eval(node)


def _is_value(node: ast.expr) -> bool:
    """Whether no result of a call meets anything within the expression: there, it could pretend to be right."""
    mixed = (ast.BinOp, ast.BoolOp, ast.Compare)
    return not any(
        isinstance(inner, ast.Call) for one in ast.walk(node) if isinstance(one, mixed) for inner in ast.walk(one)
    )


def _is_plain_call(call: ast.Call) -> bool:
    """Whether it is the call of a function on constants, and so its own result that counts."""
    inner = [*call.args, *(one.value for one in call.keywords)]
    return not any(isinstance(one, ast.Call) for argument in inner for one in ast.walk(argument))


def _truth(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node))


def _is_same(value: Any, expected: Any) -> bool:
    """Equality as in JSON: a tuple equals a list, keys are strings, floating-point numbers may differ by 1e-6."""
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = ({str(key): one for key, one in d.items()} for d in (value, expected))
        return value.keys() == expected.keys() and all(_is_same(one, expected[key]) for key, one in value.items())
    if isinstance(value, float) or isinstance(expected, float):
        if not (isinstance(value, (int, float)) and isinstance(expected, (int, float))):
            return False
        return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return value == expected
