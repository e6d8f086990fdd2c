"""Executes the notebooks of examples/notebooks and keeps what they show: `python -m tests.notebooks.execution`."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbformat import NotebookNode

from tests.runs import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, folder: Path) -> NotebookNode:
    """Return the notebook with new outputs, executed in a copy of the examples in ``folder``."""
    from nbclient import NotebookClient

    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs"))
    os.environ |= {
        **{"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        "DS_ACCELERATOR": "cpu",  # DeepSpeed, where it is installed, says otherwise that it has found no GPU
        "PYTHONWARNINGS": "ignore:IProgress",  # tqdm's, where there are no widgets
    }
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=300,
        record_timing=False,
        coalesce_streams=True,  # they come in pieces that differ from run to run
        resources={"metadata": {"path": str(folder / "examples" / "notebooks")}},
    ).execute()
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
        "coalign": {"code": hash_code(notebook)},
    }
    return notebook


def list_code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def hash_code(notebook: NotebookNode) -> str:
    """Hash the code whose outputs a notebook holds: its own, and that of the tiny model."""
    texts = [cell.source for cell in list_code(notebook)] + [(ROOT / "examples" / "arithmetic.py").read_text("utf-8")]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def describe_outputs(notebook: NotebookNode) -> list[list[tuple[str, str, int]]]:
    """Describe the outputs of each code cell by kind, stream or types, and number of lines of text."""
    return [[describe_output(output) for output in cell.outputs] for cell in list_code(notebook)]


def describe_output(output: NotebookNode) -> tuple[str, str, int]:
    if output.output_type == "stream":
        return "stream", output.name, output.text.count("\n")
    if output.output_type == "error":
        return "error", output.ename, 0
    return output.output_type, " ".join(sorted(output.data)), str(output.data.get("text/plain", "")).count("\n")


def main() -> None:
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)


if __name__ == "__main__":
    main()
