"""The site of the documentation: the reference is complete, and it builds without a warning or a broken link."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import coalign
from coalign import _HOMES as HOMES
from coalign.cli import COMMANDS
from coalign.config.functions import list_classes, list_functions, shorten_name
from coalign.config.schema import ModelConfig, RunConfig
from docs.generate import OWN_PARTS, build_reference, describe_type
from tests.docs.pages import list_pages
from tests.runs import ROOT

INSIDE_EXAMPLES = {"demo.py", "gsm8k.py", "__main__.py", "plots.py"}  # they draw and report as the commands do


@pytest.fixture(scope="module")
def reference():
    return build_reference()


def test_the_reference_has_every_setting_command_recipe_and_function(reference):
    settings = reference["reference/configuration.md"]
    for section in (RunConfig, ModelConfig):
        assert all(f"| `{name}` |" in settings for name in section.model_fields)
    assert "## `models.NAME`\n" in settings and "### `models.NAME.optimizer`\n" in settings
    assert all(f"## coalign {name}\n" in reference["reference/commands.md"] for name in COMMANDS)
    assert "## coalign launch slurm\n" in reference["reference/commands.md"]
    assert all(f"## {name}\n" in reference["reference/recipes.md"] for name in list_classes("coalign.recipes"))
    functions = reference["reference/functions.md"]
    for home in ("coalign.algorithms.losses", "coalign.algorithms.advantages", "coalign.rewards"):
        assert all(f"### {shorten_name(name)}\n" in functions for name in list_functions(home)), home
    public = [name for name in coalign.__all__ if name != "__version__"]
    assert all(f"## {name}\n" in reference["reference/python.md"] for name in public)


def test_own_parts_import_documented_names_only(reference):
    """Pages and examples show what stays; at most 80 names do."""
    documented = {f"{home}.{name}" for name in coalign.__all__ for home in ("coalign", HOMES.get(name, "coalign"))}
    documented |= {
        f"{module}.{name}" for part in OWN_PARTS.values() for module, names in part.items() for name in names
    }
    shown = re.compile(r"^ *from (coalign(?:\.\w+)*) import ([\w, ]+)", re.MULTILINE)
    pages = [page for page in list_pages() if not page.startswith(("docs/lab", "docs/zh"))]
    texts = [(ROOT / page).read_text() for page in pages]
    texts += [path.read_text() for path in (ROOT / "examples").rglob("*.py") if path.name not in INSIDE_EXAMPLES]
    used = {
        f"{module}.{name.strip().partition(' ')[0]}"
        for text in texts
        for module, names in shown.findall(text)
        for name in names.split(",")
    }
    assert not used - documented
    names = {name.rpartition(".")[2] for name in documented} - {"__version__"}
    assert len(names) <= 80
    assert not [name for name in names if f"## {name}\n" not in reference["reference/python.md"]]


def test_types_are_described_in_words():
    fields = RunConfig.model_fields["runtime"].default.__class__.model_fields
    assert describe_type(fields["keep"].annotation, fields["keep"].metadata) == "whole number > 0"
    assert describe_type(fields["steps"].annotation) == "whole number > 0, or null"
    assert describe_type(fields["best_mode"].annotation) == "`max`, `min`"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"^ +- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) | {"README.md"}
    pages = {page.removeprefix("docs/") for page in list_pages() if page.startswith("docs/")}
    assert pages == {name for name in listed if not name.startswith("reference/")}


def test_every_section_of_the_navigation_has_a_chinese_title():
    titles = re.findall(r"^  - ([A-Z][\w ]+):$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    source = (ROOT / "docs" / "hooks.py").read_text()  # read, not imported: the test environment has no MkDocs
    assert "Reference" in titles and all(f'    "{title}": "' in source for title in titles)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("material", reason="pip install 'coalign[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r'<(script|img|iframe)[^>]* src="https?:|<link[^>]* href="https?:', page.read_text()), page
    assert (tmp_path / "search" / "search_index.js").is_file() and (tmp_path / "frame_worker.js").is_file()
