"""A run that has nothing to learn says so, once, with the likely cause."""

import pytest

from tests.runs import run, settings

CONSTANT = (
    "tests.functions:never_differs",
    "step 3: nothing was learned in 3 steps in a row: every sample earned 0.5.",
)


@pytest.mark.parametrize(
    ("algorithm", "fn", "said"),
    [
        pytest.param("grpo", *CONSTANT, id="constant"),
        pytest.param("ppo", *CONSTANT, id="constant, ppo", marks=pytest.mark.slow),
        pytest.param(
            "grpo",
            "tests.rewards.failing:depends_on_the_prompt",
            "the samples of each prompt earned the same",
            id="constant for each prompt",
        ),
        pytest.param("grpo", "tests.functions:odd_groups_differ", None, id="learnable"),
    ],
)
def test_a_reward_that_teaches_nothing_is_named_once(tmp_path, caplog, algorithm, fn, said):
    config = settings(tmp_path, algorithm, steps=4, eval_at_start=False) | {"reward": {"fn": fn}}
    config["data"].pop("eval")
    assert run(config) == 0
    warnings = [record.message for record in caplog.records if "nothing was learned" in record.message]
    assert len(warnings) == (said is not None) and all(said in warning for warning in warnings)
