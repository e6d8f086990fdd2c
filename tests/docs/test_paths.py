"""Files and modules that pages name are there: `engine/engine.py`, `coalign.config.schema`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.packaging.test_metadata import read_git_files
from tests.processors import NUMERIC
from tests.runs import ROOT

# Pages that tell of the past, or of files of readers.
LEFT_OUT = ("CHANGELOG.md", "docs/lab.md")
PEOPLES = ("my_", "runs/", "path/", "output/", "configs/")
FILES = read_git_files(".")
PAGES = [name for name in FILES if name.endswith(".md") and not name.startswith("tests/") and name not in LEFT_OUT]
ENDS = {"/".join(parts[i:]) for parts in (name.split("/") for name in FILES) for i in range(len(parts))}


def list_missing(text: str) -> Iterator[str]:
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|yaml|cpp|jinja))`", text):
        if name not in ENDS and not name.startswith(PEOPLES):
            yield name
    for name in re.findall(r"\b(coalign(?:_[a-z]+)?(?:\.[a-z_]+)+)", text):
        path, _, last = name.replace(".", "/").rpartition("/")
        if last != "json" and not any(
            f"{path}{end}" in ENDS for end in (".py", "/__init__.py", f"/{last}.py", f"/{last}/__init__.py")
        ):
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    assert not [*list_missing((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("package", [name for name in FILES if name.endswith("/__init__.py") and "coalign" in name])
def test_what_a_package_names_is_inside(package):
    folder = (ROOT / package).parent
    named = re.findall(r"([\w/]+\.(?:py|yaml|cpp))\b", ast.get_docstring(ast.parse((ROOT / package).read_text())) or "")
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert not [name for name in named if name not in there and not ("/" in name and name in ENDS)]


def test_suites_of_the_makefile_name_folders_that_are_there():
    words = [word.rstrip(")") for word in (ROOT / "Makefile").read_text().split()]
    named = [word for word in words if word.startswith(("tests/", "packages/"))]
    assert not [path for path in [*named, *NUMERIC] if not list(ROOT.glob(path))]
