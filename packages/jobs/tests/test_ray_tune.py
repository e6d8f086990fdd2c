"""Ray Tune's schedulers as a sweep calls them: which trials end, worked by hand."""

import pytest

pytest.importorskip("ray.tune")

from coalign_jobs.sweep.tune import EarlyStopping


def report(stopping, values, step):
    """Report a value of each trial at a step; the trials that go on."""
    return [trial for trial, value in values.items() if stopping.goes_on(trial, step, value)]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_halving_ends_trials_below_the_best_half_of_a_rung(mode):
    sign = 1 if mode == "max" else -1
    stopping = EarlyStopping.by_halving(mode, steps=8, grace=2, reduction=2)
    values = {"a": 0.5 * sign, "b": 0.7 * sign, "c": 0.1 * sign, "d": 0.6 * sign}
    assert report(stopping, values, 1) == ["a", "b", "c", "d"]  # within the grace
    # a comes first; b is above the median 0.5; c is below that of 0.5 and 0.7; d reaches that of 0.5, 0.7 and 0.1.
    assert report(stopping, values, 2) == ["a", "b", "d"]
    assert report(stopping, values, 3) == ["a", "b", "c", "d"]  # between two rungs
    assert report(stopping, {"b": 0.7 * sign, "a": 0.4 * sign}, 4) == ["b"]
    assert report(stopping, {"b": 0.7 * sign}, 8) == ["b"]


def test_a_trial_that_goes_on_after_a_restart_is_not_judged_twice_at_a_rung():
    stopping = EarlyStopping.by_halving("max", steps=8, grace=2, reduction=2)
    assert report(stopping, {"a": 0.2, "b": 0.9}, 2) == ["a", "b"]
    assert stopping.goes_on("a", 2, 0.1)


def test_the_median_rule_ends_what_is_worse_than_the_others_means():
    stopping = EarlyStopping.by_median("max", grace=2, trials=2)
    for step in (1, 2, 3):
        assert report(stopping, {"a": 0.5, "b": 0.6}, step) == ["a", "b"]
    assert stopping.goes_on("c", 1, 0.1)
    assert not stopping.goes_on("c", 2, 0.2)
    assert stopping.goes_on("d", 2, 0.7)
