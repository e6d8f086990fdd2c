"""Logs that were written without the rules: most are named at their very line, and healthy ones give no cause."""

from __future__ import annotations

import pytest
import yaml

from coalign.diagnosis.sources import read_sources
from coalign.diagnosis.verdict import judge
from tests.diagnosis.score import HERE, is_right, read_healthy

HEALTHY = [path for path in sorted((HERE / "healthy").iterdir()) if path.name != "README.md"]


def test_most_held_out_logs_are_named_at_the_right_line():
    folder = HERE / "held_out"
    answers = yaml.safe_load((folder / "answers.yaml").read_text())
    right = 0
    for name, answer in answers.items():
        path = folder / name if (folder / name).is_dir() else folder / f"{name}.log"
        right += is_right(judge(read_sources([str(path)])), answer, folder)
    assert right >= 0.75 * len(answers)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_a_healthy_log_gives_no_cause(path):
    assert judge(read_healthy(path)).cause is None


def test_there_are_fifty_healthy_logs():
    assert len(HEALTHY) >= 50
