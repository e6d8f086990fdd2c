"""The settings of trials: grids, draws, names of folders, and spaces that cannot be searched."""

import math

import pytest

from coalign.config import ConfigError
from coalign_jobs.sweep.config import SweepConfig
from coalign_jobs.sweep.space import list_settings, name_trial
from coalign_jobs.sweep.state import SweepState


def configure(space, **settings):
    return SweepConfig(**{"base": "run.yaml", "metric": "loss/value", "space": space} | settings)


def test_a_grid_is_all_combinations_in_the_order_of_the_file():
    space = {"models.trainer.optimizer.lr": [1e-5, 1e-4], "seed": {"choice": [0, 1]}}
    listed = [tuple(each.values()) for each in list_settings(configure(space))]
    assert listed == [(1e-5, 0), (1e-5, 1), (1e-4, 0), (1e-4, 1)]
    assert list_settings(configure(space))[0].keys() == space.keys()


def test_draws_keep_to_their_bounds_and_to_their_seed():
    space = {"a": {"uniform": [1, 2.5]}, "b": {"loguniform": [1e-6, 1e-2]}, "c": {"randint": [3, 5]}}
    space |= {"d": ["x", "y"], "e": {"choice": [True]}}
    drawn = list_settings(configure(space, search="random", trials=300))
    assert drawn == list_settings(configure(space, search="random", trials=300))
    assert drawn != list_settings(configure(space, search="random", trials=300, seed=1))
    assert all(1 <= each["a"] <= 2.5 and 1e-6 <= each["b"] <= 1e-2 for each in drawn)
    assert {each["c"] for each in drawn} == {3, 4, 5} and {each["d"] for each in drawn} == {"x", "y"}
    below = sum(math.log10(each["b"]) < -4 for each in drawn)  # the middle of the logarithms
    assert 100 < below < 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "space.a: has no values"),
        ({"uniform": [2, 1]}, "expected two numbers, the lower one first"),
        ({"uniform": [1, "x"]}, "expected two numbers"),
        ({"loguniform": [0, 1]}, "loguniform begins at 0; expected a number above 0"),
        ({"randint": [1, 2.5]}, "expected two numbers"),
        ({"unifrom": [0, 1]}, "there is no distribution 'unifrom'; did you mean 'uniform'?"),
        ({"uniform": [0, 1], "randint": [0, 1]}, "expected one of choice, uniform, loguniform, randint"),
        (3, "is 3; expected a list of values, or a distribution"),
        ({"uniform": 3}, "expected a list of values"),
    ],
)
def test_a_space_that_cannot_be_searched_is_named(values, message):
    with pytest.raises(ConfigError) as refused:
        list_settings(configure({"a": values, "b": [1]}, search="random", trials=2))
    assert message in str(refused.value).replace("'a'", "a")


def test_a_grid_takes_no_distributions_and_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match="a grid takes lists; use `search: random`"):
        list_settings(configure({"a": {"uniform": [0, 1]}}))
    for settings, message in (
        ({"search": "random"}, "a random search needs the number"),
        ({"trials": 3}, "no effect with `search: grid`"),
        ({"asha": {"reduction": 3.0}}, "no effect with `scheduler: none`"),
        ({"space": {}}, "space"),
    ):
        with pytest.raises(ValueError, match=message):
            configure(**{"space": {"a": [1]}} | settings)


def test_the_name_of_a_folder_tells_the_settings():
    assert name_trial(3, {"models.trainer.optimizer.lr": 1e-05, "seed": 7}) == "trial_003_lr=1e-05_seed=7"
    assert name_trial(0, {"data.train": "/data/a b.jsonl"}) == "trial_000_train=-data-a-b.jsonl"
    assert len(name_trial(12, {"x": "long" * 50})) < 80


def test_a_sweep_that_has_changed_is_refused_by_key(tmp_path):
    config = configure({"a": [1, 2]}, output=str(tmp_path))
    state = SweepState.create(config, "base text", list_settings(config))
    state.trials[0].status, state.trials[0].value = "finished", 0.5
    state.trials[1].status = "running"
    state.save()
    again = SweepState.create(config.model_copy(update={"concurrent": 2}), "base text", list_settings(config))
    again.load()
    assert [trial.status for trial in again.trials] == ["finished", "waiting"] and again.trials[0].value == 0.5
    for changed, base, message in (
        ({"metric": "eval/mean"}, "base text", r'`metric` \(it was "loss/value"\) changed'),
        ({"space": {"a": [1, 3]}}, "base text", r"`space` \(it was .* changed"),
        ({}, "other text", "the base configuration changed"),
    ):
        other = config.model_copy(update=changed)
        with pytest.raises(ValueError, match=message):
            SweepState.create(other, base, []).load()
