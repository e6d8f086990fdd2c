"""The code reward: what it reads as code and as tests, and that a verdict cannot be forged."""

import asyncio
import sys

import pytest

from coalign.rewards.calls import RewardFunction
from coalign_graders.code import code, extract_code, read_tests
from coalign_graders.sandbox import sandbox
from coalign_graders.sandbox.sandbox import SandboxResult
from tests.rewards.samples import sample

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
PATIENT = {"seconds": 120.0, "total_seconds": 1000.0}
ASSERTS = ["assert double(1) == 2", "assert double(5) == 10", "assert double(4) > 7", "assert double('a') == 'aa'"]
RIGHT = "def double(x): return 2 * x"


def score(source, tests, **config):
    """The reward of each source on the same tests, or of the only one."""
    sources = [source] if isinstance(source, str) else source
    row = {"tests": tests, "entry_point": "double"}

    async def all_of_them():
        return [await code(sample(f"```python\n{one}\n```", **row), **{**PATIENT, **config}) for one in sources]

    rewards = [scored["reward"] for scored in asyncio.run(all_of_them())]
    return rewards[0] if isinstance(source, str) else rewards


@pytest.mark.parametrize(
    ("response", "source"),
    [
        ("```python\na\n```\nso\n```python\nb\n```", "b\n"),
        ("```py\na\n```\nprints\n```\n5\n```", "a\n"),
        ("```\na\n```\nor\n```\nb\n```\n", "b\n"),
        ("<think>```python\na\n```</think>```Python3\nb\nc\n```", "b\nc\n"),
        ("It is\n  ```python title=x\na\n  ```", "a\n"),
        ("```python\ncut off", "cut off"),
        ("x = '```'", "x = '```'"),
        ("<think>hm</think>print(1)", "print(1)"),
        ("<think>```python\na\n```", ""),
        ("", ""),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n2. x", "def f():\n    return 1\n"),
        ("- ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
        ("* so\n\n\t```python\n\ta\n\tb\n\t```", "a\nb\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("> ```python\n> def f():\n>     return 1\n>\n> x\n> ```", "def f():\n    return 1\n\nx\n"),
        ("> 1. ```py\n>    a\n>    ```", "a\n"),
        ("```{python}\na\n```", "a\n"),
        ("```python\na\n```python\nb\n```", "b\n"),
        ("```python\ndef f():\n    '''\n    ```\n    '''\n```", "def f():\n    '''\n    ```\n    '''\n"),
        ("  ```python\ndef f():\n  if 1:\n    x\n  ```", "def f():\n  if 1:\n    x\n"),
    ],
)
def test_the_last_block_of_python_is_the_code(response, source):
    assert extract_code(response) == source


@linux
def test_assert_statements_are_shared_out():
    wrong_for_some = "def double(x): return 2 * x if x != 5 else 0"
    assert score([RIGHT, wrong_for_some, "def other(): pass", "no python"], ASSERTS) == [1.0, 0.75, 0.0, 0.0]
    assert score([RIGHT, wrong_for_some], ASSERTS, partial=False) == [1.0, 0.0]


@linux
def test_a_program_of_tests_passes_as_a_whole():
    program = "import math\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n"
    assert score([RIGHT, "def double(x): return 2"], program) == [1.0, 0.0]
    assert score(RIGHT, "def test():\n    assert double(3) == 6\n\ntest()") == 1.0


@linux
def test_standard_input_and_output():
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": " 4"}]
    adds = "print(sum(map(int, input().split())))"
    main = (
        "import sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\nif __name__ == '__main__': main()"
    )
    failing = adds + "\nraise SystemExit(1)"
    assert score([adds, main, "print(3)", failing], cases) == [1.0, 1.0, 0.5, 0.0]
    assert score(adds, {"inputs": [["1 2"], "2 2"], "outputs": ["3", ["4"]]}) == 1.0
    assert score(adds, '{"inputs": ["1 2"], "outputs": ["3"]}') == 1.0


@linux
def test_functions_and_methods_by_name():
    calls = {"fn_name": "halves", "inputs": [[[1, 2]], [[]], [[3]]], "outputs": [[0.5, 1], [], [[1.5]]]}
    function = "def halves(many): return [x / 2 for x in many]"
    method = "class Solution:\n    def halves(self, many): return tuple(x / 2 + 1e-9 for x in many)"
    assert score([function, method, "halves = sorted"], calls) == [1.0, 1.0, pytest.approx(1 / 3)]


@linux
def test_a_program_ends_as_in_any_interpreter():
    cases = [{"input": "", "output": "6"}]
    ends = ["exit()", "quit()", "exit(0)", "import sys; sys.exit()", "raise SystemExit"]
    ends += ["copyright, credits, license, help"]
    assert score([f"print(6); {end}" for end in ends], cases) == [1.0] * len(ends)
    assert score(["print(6); exit(1)", "print(6); exit('no')"], cases) == [0.0, 0.0]


FUNCTIONAL = {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}  # a case of LiveCodeBench


@linux
@pytest.mark.parametrize(
    ("case", "row"),
    [
        (FUNCTIONAL, {"metadata": '{"func_name": "add"}'}),
        (FUNCTIONAL, {"entry_point": "add"}),
        (FUNCTIONAL | {"metadata": {"func_name": "add"}}, {}),
        (FUNCTIONAL | {"func_name": "add", "input": [[1, 2], 3], "output": [4, 5]}, {}),
    ],
)
def test_functional_tests_call_the_function(case, row):
    method = "class Solution:\n  def add(self, a: List[int], b: int) -> List[int]: return [x + pow(b, 1, 9) for x in a]"
    function = "from __future__ import annotations\ndef add(a: List[int], b): return [x + b for x in a]"
    for source, expected in ((method, 1.0), (function, 1.0), ("def add(a, b): return a", 0.0), ("print([4, 5])", 0.0)):
        assert asyncio.run(code(sample(source, tests=[case], **row), **PATIENT))["reward"] == expected


@linux
def test_a_functional_result_stands_in_no_list_of_its_own():
    case = {"input": "5", "output": "[5]", "testtype": "functional", "func_name": "f"}
    assert score(["def f(x): return x", "def f(x): return [x]"], [case]) == [0.0, 1.0]
    assert score("print(input())", [{"input": "5", "output": "5", "testtype": "stdin"}]) == 1.0


# Each of them would pass a harness that looks at exit codes, at output, or compares beside the code.
ALL_EQUAL = """
class All:
    __eq__ = __gt__ = lambda *_: True
    __repr__ = lambda self: "All()"
def double(x): return All()
"""
FORGERIES = {
    "exit": "import sys; sys.exit(0)",
    "os exit": "import os; os._exit(0)",
    "exit when called": "import os\ndef double(x): os._exit(0)",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return None",
    "print": "print('passed', True, 1.0)\ndef double(x): print('OK')",
    "equal to all": ALL_EQUAL,
    "write answers": "import os\nfor fd in range(3, 5): os.write(fd, b'passed True')",
    "no assertions": "import builtins\nbuiltins.AssertionError = BaseException\ndef double(x): return 0",
    "no tests": "import os\nfor f in os.listdir('.'): os.remove(f)\ndef double(x): return 0",
    "kill": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)",
    "exec": "import builtins\nbuiltins.exec = lambda *a, **k: None\ndef double(x): return 0",
    "compile": "import builtins\nreal = compile\nbuiltins.compile = lambda s, f, m, *a: real('0', f, m)\ndouble = id",
    "harness": "import __main__\n__main__.main.__globals__['job'].exec = lambda *a: None\ndef double(x): return 0",
    "repr": "import builtins\nbuiltins.repr = lambda x: 'True'\ndef double(x): return 0",
    "built-ins": "import builtins\nfor k in ('abs', 'all', 'set'): setattr(builtins, k, bool)\ndouble = abs",
    "swallow": "import sys\nsys.excepthook = lambda *_: sys.exit(0)\ndef double(x): return 0",
}


HUMAN_EVAL = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n"
TESTS = {
    "value": ASSERTS[:1],
    "program": "import math\nassert double(1) == 2 and double(2) == 4",
    "check": HUMAN_EVAL,
    "loop": "for x in (1, 2):\n    assert double(x) == 2 * x, abs(x)",
}


@linux
@pytest.mark.parametrize("tests", TESTS.values(), ids=TESTS)
def test_a_verdict_cannot_be_forged(tests):
    # Statements that run beside the code do meet its own objects: there, overloading `==` works, as anywhere.
    tried = [name for name in FORGERIES if name != "equal to all" or tests != TESTS["loop"]]
    rewards = score([FORGERIES[name] for name in tried], tests)
    assert dict(zip(tried, rewards, strict=True)) == dict.fromkeys(tried, 0.0)
    assert score(RIGHT, tests) == 1.0


@linux
def test_a_test_that_hangs_fails_alone():
    hangs = "def double(x):\n    while x == 5: pass\n    return 2 * x"
    assert score(hangs, ASSERTS, seconds=3.0) == 0.75


@linux
def test_time_for_all_tests_together_runs_out():
    row = sample("while True: pass", tests=["assert True"] * 50)
    scored = asyncio.run(code(row, seconds=0.2, total_seconds=0.3))
    assert scored == {"reward": 0.0, "solved": 0.0, "timed_out": 1.0, "forgeable": 1.0}


@linux
def test_many_samples_at_once():
    async def together():
        samples = [sample(RIGHT if i % 2 else "bad", tests=ASSERTS, index=i) for i in range(8)]
        return await asyncio.gather(*(code(one, **PATIENT) for one in samples))

    assert [one["solved"] for one in asyncio.run(together())] == [0.0, 1.0] * 4
    assert RewardFunction("code", code).at_once >= 1


JUDGED = [  # an assert; a value that is right, and one that is wrong; None if it has to be judged beside the code
    ("assert f(1) == 2", "2", "3"),
    ("assert 2 == f(1)", "2", "(2,)"),
    ("assert f(1) == (1, 2)", "(1, 2)", "[1, 2]"),
    ("assert f(1) != 2", "3", "2"),
    ("assert 0 < f(1) <= 5", "5", "0"),
    ("assert f(1) is None", "None", "0"),
    ("assert f(1) is not True", "1", "True"),
    ("assert f(1) in (3, 4)", "4", "5"),
    ("assert 'a' in f(1)", "'cat'", "5"),
    ("assert set(f(1)) == set([1, 2])", "{1, 2}", "[1, 2]"),
    ("assert sorted(f(1)) == sorted((2, 1))", "[1, 2]", "(1, 2)"),
    ("assert f(1) == -float('inf')", "-1e999", "0"),
    ("assert abs(f(1) - 0.5) < 1e-6, 'near'", "0.5000000001", "0.6"),
    ("assert abs(0.5 - f(1)) < 1e-6", "0.5", "'a'"),
    ("assert math.fabs(f(1) - 10**400) < 1", None, None),
    ("assert math.isclose(f(1), 2.0, rel_tol=0.1)", "2.1", "3"),
    ("assert math.isclose(f(1), 2.0)", "2", "10" * 400),
    ("assert f(1)", "True", "False"),
    ("assert not f(1)", "False", "True"),
    ("assert f(1) and f(2) == 2", "True, 2", "True, 3"),
    ("assert True", "", "1"),
    ("assert f(1) == f(2)", None, None),
    ("assert all(f(x) == 1 for x in range(3))", None, None),
    ("assert f(1) - 2 == 0", None, None),
    ("assert np.allclose(f(1), [1.0])", None, None),
    ("assert isinstance(f(1), int)", None, None),
    ("assert f(1) is 5", None, None),
    ("assert f(1) == 2 or f(1) == 3", None, None),
    ("for x in (1, 2): assert f(x) == x", None, None),
    ("raise ValueError", None, None),
]


@pytest.mark.parametrize(("statement", "right", "wrong"), JUDGED)
def test_what_is_judged_outside(statement, right, wrong):
    (test,) = read_tests([statement])
    verdict = {one: test.passes(report_of(test, f"[{one}]")) for one in (right, wrong)}
    if right is None:
        assert test.forgeable == (statement != "assert True") and test.request["test"] == statement
    else:
        assert verdict == {right: True, wrong: False}
        assert not test.passes(report_of(test, "")) and not test.passes(SandboxResult("exit 0", "", f"[{right}]"))


def report_of(test, answer):
    return SandboxResult("exit 0", "", test.request["token"] + answer)


def test_the_expected_values_of_a_check_stay_outside():
    (test,) = read_tests(f"{HUMAN_EVAL}    assert True, 'This prints'\n    print(candidate(3))\n", "double")
    assert [line.strip() for line in test.request["test"].splitlines() if line] == [
        "METADATA = {}",
        "def check(candidate):",
        *("__answer__(candidate(1))", "__answer__(candidate(2))", "print(candidate(3))"),
        "check(double)",
    ]
    assert not test.forgeable and test.passes(report_of(test, "[2, 4]"))
    for wrong in ("[2, 5]", "[2]", "[2, 4, 4]", "[]", "[4, 2]"):
        assert not test.passes(report_of(test, wrong))
    returns = HUMAN_EVAL.replace("    assert candidate(2)", "    if skip: return\n    assert candidate(2)")
    for beside in (returns, HUMAN_EVAL + "    for i in range(9): assert candidate(i) == 2 * i\n"):
        assert read_tests(beside, "double")[0].forgeable


@linux
def test_what_a_function_is_called_does_not_matter():
    """MBPP has tasks whose function hides a built-in."""
    tests = ["assert sum(10, 15) == 6", "assert set(sorted(3)) == set((3, 4))", "assert not abs(1)"]
    named = "def sum(a, b): return 6\ndef sorted(x): return [3, 4, 3]\ndef abs(x): return 0"
    assert score(named, tests) == 1.0


@linux
def test_what_is_judged_beside_the_code_is_counted():
    row = sample(RIGHT, tests=["assert double(2) == 4", "assert double(2) == double(2)"])
    assert asyncio.run(code(row, **PATIENT))["forgeable"] == 0.5


NO_TESTS = [
    ([], "are empty"),
    (5, "tests are 5; expected a list of assert"),
    ([{"in": 1}], "expected a list"),
    ({"inputs": ["1"], "outputs": []}, "shorter"),
    ({"fn_name": "a.b", "inputs": [[1]], "outputs": [1]}, "name of a function"),
    ({"fn_name": "class", "inputs": [[1]], "outputs": [1]}, "name of a function"),
    ({"fn_name": 5, "inputs": [[1]], "outputs": [1]}, "name of a function"),
    ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "the list of its arguments"),
    ({"inputs": 5, "outputs": 5}, "expected a list"),
    ("[" * 10**5, "nested too deeply"),
    ([FUNCTIONAL], "neither it nor the row's `metadata` has a `func_name`"),
    ([FUNCTIONAL | {"testtype": "interactive"}], "testtype is 'interactive'; expected `stdin` or `functional`"),
    ([FUNCTIONAL | {"func_name": "f", "input": "1 2"}], "a test of f is .*expected JSON"),
    ([FUNCTIONAL | {"func_name": "a.b"}], "fn_name is 'a.b'"),
]


@pytest.mark.parametrize(("tests", "message"), NO_TESTS, ids=[message for _, message in NO_TESTS])
def test_tests_that_cannot_be_read_are_failures_of_the_reward(tests, message):
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


def test_a_row_without_tests_is_a_failure_of_the_reward():
    with pytest.raises(KeyError, match=r"no tests in 'tests'; it has \['answer'\] \(set tests_key\)"):
        asyncio.run(code(sample("x", answer=1)))


HOSTILE = (
    *("", "[" * 10**5, "-" * 10**5 + "1", "__import__('os')", "\0", "9" * 10**5, "f()", "1 +", "{[]: 1}", "{{}}", "5"),
    *("{0x" + "f" * 10**4 + ": 1}", "0x" + "f" * 10**4, "1e999", "\ud800", "'\\N{x}'", "b'\\xf'", "1 if 1 else 2"),
    "*a",
)


def test_hostile_answers_are_wrong_not_errors():
    tests = [
        *read_tests(["assert f() == [1]", "assert abs(f() - 1.5) < 1", "assert 3 in f()", "assert 0 < f() < 5"]),
        *read_tests({"fn_name": "f", "inputs": [[1]] * 3, "outputs": [1.5, {"a": 1.5}, [[1.5]]]}),
    ]
    for answer in HOSTILE:
        assert not any(test.passes(report_of(test, f"[{answer}]")) for test in tests)
        assert not any(test.passes(report_of(test, answer)) for test in tests)
    assert tests[0].passes(report_of(tests[0], "[[1]]"))


@linux
def test_objects_that_cannot_be_read_are_wrong():
    unhashable = "class Odd:\n    def __repr__(self): return '{[]: 1}'\ndef f(x): return Odd()"
    huge = "def f(x): return 10 ** 400"
    hexadecimal = "class Odd:\n    def __repr__(self): return '0x' + 'f' * 9999\ndef f(x): return {Odd(): 1}"
    calls = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1.5, {"a": 1}]}
    assert score([unhashable, huge, hexadecimal, "f = 5", "raise KeyboardInterrupt"], calls) == [0.0] * 5


@linux
def test_an_interrupt_of_the_supervisor_is_a_verdict():
    interrupt = "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n"
    assert score([interrupt, interrupt.replace("os.getppid()", "0")], ASSERTS) == [0.0, 0.0]


def test_a_machine_that_cannot_keep_what_is_required(monkeypatch):
    monkeypatch.setattr(sandbox, "find_shortfalls", lambda processes: {"files": "Landlock"})
    message = r"files \(needs Landlock\).*`require: \[network, libraries, disk, signals, "
    with pytest.raises(sandbox.LimitNotEnforceable, match=message):
        asyncio.run(code(sample("x", tests=ASSERTS)))
