"""Companions that say they need neither torch nor Coalign install and work in an empty environment, and start fast."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.packaging.installation import build, run
from tests.packaging.licences import ROOT

FASTEST = 0.5  # seconds to start, beyond those of an interpreter
GRADE = """
import asyncio, sys
from types import SimpleNamespace
from coalign_graders.answers import f1
from coalign_graders.choice import multiple_choice
from coalign_graders.math_answer import math

def grade(fn, response, truth):
    return fn(SimpleNamespace(prompt="", response=response, meta={"answer": truth}))

assert asyncio.run(grade(math, r"so \\boxed{42.0}", "42")) == 1.0
assert grade(multiple_choice, "Answer: C", "C") == 1.0 and grade(f1, "the cat", "cat") == 1.0
assert not {"torch", "coalign"} & sys.modules.keys()
"""
PREDICT = """
import sys
from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.prediction import predict_step
assert ClusterSpec.parse("2x8:H100").gpus == 16
assert not {"torch", "coalign"} & sys.modules.keys()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An environment with these companions and nothing else of ours."""
    folder = tmp_path_factory.mktemp("alone")
    run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    for name in ("diagnose", "graders", "plan"):
        build(ROOT / "packages" / name, folder)
    packages = map(str, folder.glob("*.whl"))
    python = folder / "venv" / "bin" / "python"
    run(
        [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *packages],
        folder,
    )
    return python


def measure(command: list[str], folder: Path) -> float:
    """Return the fewest seconds of three runs, beyond those of an interpreter that does nothing."""

    def time_run(words: list[str]) -> float:
        started = time.perf_counter()
        run(words, folder)
        return time.perf_counter() - started

    return min(time_run(command) for _ in range(3)) - min(time_run([command[0], "-c", "pass"]) for _ in range(3))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_they_work_without_torch_and_without_coalign(python, tmp_path):
    with pytest.raises(RuntimeError, match="No module named"):
        run([str(python), "-c", "import coalign"], tmp_path)
    (tmp_path / "run.log").write_text(
        "step 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    assert "memory" in run([str(python), "-m", "coalign_diagnose", "run.log"], tmp_path)
    assert measure([str(python), "-m", "coalign_diagnose", "--help"], tmp_path) < FASTEST
    assert (
        measure([str(python), "-c", "import coalign_graders.math_answer, coalign_graders.choice"], tmp_path) < FASTEST
    )
    run([str(python), "-c", GRADE], tmp_path)
    assert measure([str(python), "-c", PREDICT], tmp_path) < FASTEST
