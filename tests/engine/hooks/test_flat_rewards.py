"""A run that has nothing to learn says so, once, with the likely cause."""

import pytest

from tests.runs import run, settings


def list_warnings(caplog):
    return [record.message for record in caplog.records if "nothing was learned" in record.message]


def train(directory, algorithm, fn, steps=4):
    config = settings(directory, algorithm, steps=steps, eval_at_start=False) | {"reward": {"fn": fn}}
    config["data"].pop("eval")
    assert run(config) == 0


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_constant_reward(tmp_path, caplog, algorithm):
    train(tmp_path, algorithm, "tests.functions:never_differs")
    (message,) = list_warnings(caplog)
    assert message.startswith("step 3: nothing was learned in 3 steps in a row: every sample earned 0.5.")


def test_groups_whose_samples_are_equal(tmp_path, caplog):
    train(tmp_path, "grpo", "tests.rewards.failing:depends_on_the_prompt")
    (message,) = list_warnings(caplog)
    assert "the samples of each prompt earned the same" in message


def test_a_run_that_learns_is_silent(tmp_path, caplog):
    train(tmp_path, "grpo", "tests.functions:odd_groups_differ", steps=3)
    assert not list_warnings(caplog)
