"""Logs that were written without the rules: most have the right cause named, and healthy ones have none."""

import pytest

from coalign_diagnose.verdict import judge
from packages.diagnose.tests.score import HERE, SETS, judge_set, read_healthy

HEALTHY = [path for path in sorted((HERE / "healthy").iterdir()) if path.name != "README.md"]


@pytest.mark.parametrize("folder", SETS, ids=lambda folder: folder.name)
def test_most_held_out_logs_are_named_right(folder):
    judged = judge_set(folder)
    assert len(judged) >= 30
    assert sum(each.is_at_line for each in judged) >= 0.75 * len(judged), "at the line"
    assert sum(each.is_of_category for each in judged) >= 0.85 * len(judged), "by category"


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_a_healthy_log_gives_no_cause(path):
    assert judge(read_healthy(path)).cause is None


def test_there_are_many_healthy_logs():
    assert len(HEALTHY) >= 85
