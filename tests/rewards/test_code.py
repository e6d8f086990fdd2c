"""The code reward: what it reads as code and as tests, and that a verdict cannot be forged."""

import asyncio
import sys

import pytest

from coalign.rewards.calls import RewardFunction
from coalign.rewards.code import code, extract_code
from coalign.rewards.code_tests import read_tests
from coalign.rewards.sandbox import sandbox
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
        ("", ""),
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
    "swallow": "import sys\nsys.excepthook = lambda *_: sys.exit(0)\ndef double(x): return 0",
}


@linux
@pytest.mark.parametrize(
    "tests", [ASSERTS[:1], "import math\nassert double(1) == 2 and double(2) == 4"], ids=["value", "run"]
)
def test_a_verdict_cannot_be_forged(tests):
    # Statements that run beside the code do meet its own objects: there, overloading `==` works, as anywhere.
    tried = [name for name in FORGERIES if name != "equal to all" or isinstance(tests, list)]
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
    assert scored == {"reward": 0.0, "solved": 0.0, "timed_out": 1.0}


@linux
def test_many_samples_at_once():
    async def together():
        samples = [sample(RIGHT if i % 2 else "bad", tests=ASSERTS, index=i) for i in range(8)]
        return await asyncio.gather(*(code(one, **PATIENT) for one in samples))

    assert [one["solved"] for one in asyncio.run(together())] == [0.0, 1.0] * 4
    assert RewardFunction("code", code).at_once >= 1


def test_rows_without_usable_tests_are_failures_of_the_reward():
    with pytest.raises(KeyError, match=r"no tests in 'tests'; it has \['answer'\] \(set tests_key\)"):
        asyncio.run(code(sample("x", answer=1)))
    for tests, message in (
        ([], "are empty"),
        (5, "tests are 5; expected a list of assert"),
        ([{"in": 1}], "expected a list"),
        ({"inputs": ["1"], "outputs": []}, "shorter"),
        ({"fn_name": "a.b", "inputs": [[1]], "outputs": [1]}, "name of a function"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tests(tests)


def test_hostile_answers_are_wrong_not_errors():
    (test,) = read_tests(["assert f() == [1]"])
    for answer in ("", "[" * 10**5, "-" * 10**5 + "1", "__import__('os')", "\0", "9" * 10**5, "f()", "1 +"):
        assert not test.passes(sandbox.SandboxResult("exit 0", "", answer))
    assert test.passes(sandbox.SandboxResult("exit 0", "", "[1]"))


def test_a_machine_that_cannot_keep_what_is_required(monkeypatch):
    monkeypatch.setattr(sandbox, "find_shortfalls", lambda processes: {"files": "Landlock"})
    with pytest.raises(
        sandbox.LimitNotEnforceable, match=r"files \(needs Landlock\).*`require: \[network, memory, processes, time\]`"
    ):
        asyncio.run(code(sample("x", tests=ASSERTS)))
