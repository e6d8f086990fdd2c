"""The table of metrics: what the code logs has an entry, and an entry is logged."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import coalign
from coalign.run_files.metric_table import LANGUAGES, _find_entry, _MetricEntry, _read_entries, describe_metric

PACKAGE = Path(coalign.__file__).parent
AGENTS = PACKAGE.parent / "packages" / "agents" / "coalign_agents"
LOGGING = ("algorithms", "backends", "checkpoint", "cluster", "data", "engine", "environments", "recipes", "rewards")
LOGGING += ("weights",)
KINDS = {"Stat", "Max", "Total", "Moments", "EffectiveSize"}
# Before a name as the code has it: losses return bare names, episodes count them, evaluations begin with `eval/`.
BEFORE = r"(?:loss/|episode/|eval/|reward/.+/)?"


def walk(*rooms: str) -> Iterator[ast.AST]:
    for path in (path for room in rooms for path in (PACKAGE / room).rglob("*.py")):  # AGENTS is absolute
        yield from ast.walk(ast.parse(path.read_text()))


@cache
def list_keys() -> dict[str, bool]:
    """Return the keys of dictionaries in code that logs, with `*` for what is filled in, and which have a metric."""
    keys: dict[str, bool] = {}
    for node in walk(*LOGGING):
        for key, value in find_items(node):
            if key is not None and (name := read_name(key)):
                keys[name] = keys.get(name, False) or is_metric(value)
    return keys


def find_items(node: ast.AST) -> list[tuple[ast.AST | None, ast.AST]]:
    match node:
        case ast.Dict():
            return list(zip(node.keys, node.values, strict=True))
        case ast.DictComp():
            return [(node.key, node.value)]
        case ast.Assign(targets=[*targets], value=value) if not isinstance(value, ast.Constant):
            return [(target.slice, value) for target in targets if isinstance(target, ast.Subscript)]
        case ast.AugAssign(target=ast.Subscript(slice=key), value=value):
            return [(key, value)]
    return []


@cache
def list_counts() -> set[str]:
    """Return what episodes count: `episode.count("name")`, and `self.counts["name"] += 1`."""
    counts = set()
    for node in walk("environments", str(AGENTS)):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="count"), args=[name, *_]):
                if ast.unparse(owner) in ("self", "episode", "self.episode"):
                    counts.add(read_name(name))
            case ast.AugAssign(target=ast.Subscript(value=ast.Attribute(attr="counts"), slice=name)):
                counts.add(read_name(name))
    return {f"episode/{name}" for name in counts if name}


def is_metric(value: ast.AST | None) -> bool:
    """Whether an expression is a call such as Total(…) or Stat.of(…)."""
    if not isinstance(value, ast.Call):
        return False
    function = value.func.value if isinstance(value.func, ast.Attribute) else value.func
    return isinstance(function, ast.Name) and function.id in KINDS


def read_name(key: ast.AST) -> str | None:
    """Return a text with `*` for what is filled in; None without a letter of its own."""
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    if isinstance(key, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in key.values]
        return "".join(parts) if any(letter.isalpha() for letter in "".join(parts)) else None
    return None


def is_logged_as(entry: _MetricEntry, name: str) -> bool:
    """Whether code that logs ``name`` may log a metric of this entry."""
    return re.fullmatch(BEFORE + ".+".join(map(re.escape, name.split("*"))), entry.name) is not None


def test_every_metric_of_the_code_has_an_entry():
    names = {name for name, has_metric in list_keys().items() if has_metric} | list_counts()
    assert len(names) > 100 and "episode/tool_calls" in names  # the search finds them
    commands = {"logprobs/difference"}  # of `coalign check-sync`
    missing = [name for name in names - commands if not any(is_logged_as(entry, name) for entry in _read_entries())]
    assert missing == [], "metrics.yaml has no entry for these"


def test_every_entry_is_logged():
    names = {*list_keys(), *list_counts()}
    folders = [*(PACKAGE / room for room in LOGGING), *PACKAGE.parent.glob("packages/*/coalign_*")]
    texts = {text for folder in folders for path in folder.rglob("*.py") for text in read_words(path.read_text())}
    for entry in _read_entries():
        assert any(is_logged_as(entry, name) for name in names), f"{entry.name} is logged nowhere"
        words = read_words(re.sub(r"<\w+>", "", entry.name))
        assert all(word in texts for word in words), f"{entry.name} is logged nowhere"


def read_words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.parametrize(
    ("name", "entry", "before"),
    [
        ("reward/mean", "reward/mean", ""),
        ("reward/a/b/mean", "reward/<part>/mean", ""),
        ("reward/mine/length", "reward/<part>/<key>", ""),
        ("reward/failed/timeout", "reward/failed/<reason>", ""),
        ("eval/mean@4", "eval/mean@<n>", ""),
        ("eval/math/mean@4", "eval/mean@<n>", "eval/math"),
        ("eval/loss/value", "loss/value", "eval"),
        ("eval/math/loss/value", "loss/value", "eval/math"),
        ("eval/reward/math/mean", "reward/<part>/mean", "eval"),
        ("eval/kl", "kl", "eval"),
        ("value/loss/grad_norm", "loss/grad_norm", "value"),
        ("loss/mine", "loss/<name>", ""),
        ("rollout/cut", "rollout/cut", ""),
        ("teacher_math/cut", "<teacher>/cut", ""),
        ("time/policy.generate", "time/<model>.<method>", ""),
        ("time/group", "time/<function>", ""),
        ("memory/device", "memory/device", ""),
        ("swaps/mib", "swaps/mib", ""),
    ],
)
def test_a_name_has_the_entry_that_says_most(name, entry, before):
    match = _find_entry(name)
    assert match is not None and (match[0].name, match[1]) == (entry, before)


@pytest.mark.parametrize("name", ["hook/seen", "seen", "eval", "eval/", "eval/mine/seen", "", "/"])
def test_a_metric_of_a_run_of_its_own_has_none(name):
    assert _find_entry(name) is None and describe_metric(name) is None


def test_a_description_is_one_sentence_with_its_unit():
    assert describe_metric("value/loss/lr") == {
        "en": "value: Learning rate, as a mean over updates. [number]",
        "zh": "value: 学习率，对各次更新取平均。 [数]",
    }
    for entry in _read_entries():
        for language in LANGUAGES:
            assert entry.meaning[language].endswith((".", "。")) and entry.unit[language], entry.name
        assert not re.search(r"\b(these|[Tt]he same)\b", entry.meaning["en"].replace("all the same", "")), entry.name


def test_the_table_is_light():
    code = (
        "import sys, coalign.run_files.metric_table; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
