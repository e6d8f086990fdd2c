"""The house in figures: words, comments, names of files, lines of each room, modules that a run loads."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_imports import COMPANION_FILES, FILES, PACKAGE, name_file, parse

# Lines that a room may have. A change that needs more moves or removes something, or raises the budget and says why.
BUDGETS = {
    "algorithms": 2_540,
    "backends": 10_010,
    "checkpoint": 1_260,
    "cli": 495,
    "cluster": 6_640,
    "config": 3_410,
    "data": 5_950,
    "engine": 5_065,
    "environments": 1_220,
    "launch": 1_630,
    "processes": 845,
    "recipes": 1_020,
    "report": 1_370,
    "resilience": 110,
    "rewards": 905,
    "run_files": 690,
    "weights": 2_040,
    "": 2_875,  # modules beside the rooms
}
CORE_FILES, CORE_LINES = 290, 47_990
# Words that stand for a noun in a name: `found` for the nodes that were found.
FILLERS = {
    *("found", "part", "parts", "each", "own", "kind", "kinds", "place", "places", "whole", "late", "begun", "most"),
    *("ahead", "known", "other", "others", "where", "before"),
}
FILLER_SHARE = 0.01


def list_stored_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module stores: variables, attributes, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_filler(name: str) -> bool:
    return any(word in FILLERS for word in name.strip("_").split("_"))


def list_comments(file: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def count_lines(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n")


def test_names_are_nouns_and_verbs_of_the_field():
    for files in (FILES, COMPANION_FILES):
        names = [name for file in files for name in list_stored_names(parse(file))]
        share = sum(map(is_filler, names)) / len(names)
        assert share < FILLER_SHARE, f"{share:.2%} of the stored names are filler words"


def test_no_comment_begins_with_of():
    """The noun before it is missing in the name: `_BYTES = 1 << 16  # of one answer` is MAX_ANSWER_BYTES."""
    comments = [(name_file(file), text) for file in FILES + COMPANION_FILES for text in list_comments(file)]
    assert not [(file, text) for file, text in comments if re.match(r"#\s*of\b", text)]


def test_no_file_name_stands_twice_in_the_core():
    names = Counter(file.name for file in FILES if file.name not in ("__init__.py", "__main__.py"))
    assert not {name for name, count in names.items() if count > 1}


def test_rooms_keep_to_their_budgets():
    lines = Counter()
    for file in FILES:
        room, *inside = file.relative_to(PACKAGE).parts
        lines[room if inside else ""] += count_lines(file)
    over = {room: (count, BUDGETS.get(room, 0)) for room, count in lines.items() if count > BUDGETS.get(room, 0)}
    assert not over, f"lines and budget: {over}"
    assert len(FILES) <= CORE_FILES and lines.total() <= CORE_LINES


def test_no_function_is_longer_than_100_lines():
    files = FILES + COMPANION_FILES
    functions = [node for file in files for node in ast.walk(parse(file)) if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 100]


@pytest.mark.parametrize(("module", "most"), [("coalign.launch.run", 140), ("coalign.cli", 14)])
def test_a_start_loads_few_modules(module, most):
    code = f"import sys, {module}; print(sum(name.partition('.')[0].startswith('coalign') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= most
