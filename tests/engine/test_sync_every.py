"""Syncs every few steps: samples come from the weights of the last one, and the bound on staleness counts it."""

from __future__ import annotations

from tests.runs import metrics, run, run_in_two_parts, run_to_end, settings, weights_hash


def configured(tmp_path, **runtime):
    return settings(tmp_path, "grpo", max_staleness=1, eval_at_start=False, **runtime) | {"sync": {"every": 2}}


def test_samples_are_of_the_version_of_the_last_sync(tmp_path):
    config = configured(tmp_path, steps=5)
    lines = [line for line in run_to_end(config) if "samples/staleness" in line]
    assert [line["samples/staleness"] for line in lines] == [0, 1, 0, 1, 0]
    assert ["sync/seconds" in line for line in lines] == [False, True, False, True, True]  # at the end, too


def test_a_run_continued_at_a_sync_ends_with_the_same_weights(tmp_path):
    config = configured(tmp_path)
    assert run(config) == 0
    assert weights_hash(run_in_two_parts(config, 2), 4) == weights_hash(config, 4)


def test_a_run_continued_between_two_syncs_keeps_to_the_schedule(tmp_path):
    """What was under way is generated anew, by the weights that are there."""
    lines = metrics(run_in_two_parts(configured(tmp_path, steps=6), 3))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["samples/staleness_max"] <= 1 for line in lines)
