"""The notebooks of examples/notebooks: valid, with the outputs of the code that they hold, and executable."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.notebooks.execution import NOTEBOOKS, describe_outputs, execute, hash_code, list_code


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_small_and_executed_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = list_code(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [kind for outputs in describe_outputs(notebook) for kind, *_ in outputs if kind == "error"]
    assert notebook.metadata.coalign.code == hash_code(notebook), "run python -m tests.notebooks.execution"
    text = path.read_text(encoding="utf-8")
    assert "u001b" not in text and not re.search(r"\\r(?!\\n)", text)  # a notebook is no terminal
    assert len(text) < 100_000
    assert "/tmp" not in text and "/home" not in text and "site-packages" not in text  # nor paths of one machine


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_again_what_it_holds(path, tmp_path):
    held = describe_outputs(nbformat.read(path, as_version=4))
    assert describe_outputs(execute(path, tmp_path)) == held
