"""`coalign check` calls the reward functions of a run once, on its first row."""

import pytest

from coalign.config.errors import ConfigError
from coalign.config.functions import refuse_code
from tests.runs import settings, show_check

HERE = "tests.rewards.failing:"


def check_run(directory, *rewards):
    config = settings(directory, "grpo") | {"reward": [{"fn": fn} if isinstance(fn, str) else fn for fn in rewards]}
    return show_check(config)


def test_it_shows_what_each_function_returns(tmp_path):
    screen = check_run(tmp_path, "exact_match", "tests.rewards.failing:counts_a_group", {"fn": "tests.digits:digits"})
    assert "reward exact_match: 1 for the first row's answer, 0 for an empty response" in screen
    assert "reward counts_a_group: 2 for the first row's answer, 2 for an empty response" in screen
    assert "reward digits: " in screen


def test_rows_without_an_answer_have_an_empty_response_alone(tmp_path):
    config = settings(tmp_path, "grpo") | {"reward": [{"fn": "tests.functions:length"}]}
    for split in ("train", "eval"):
        config["data"][split] = str(tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(8)))
    assert "reward length: 0 for an empty response\n" in show_check(config)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("forgets_zero", r"reward\[0\]: `forgets_zero` returned None for an empty response: is a `return 0.0`"),
        ("misspells", r"fails on the first row's answer: KeyError: 'anwser' \(tests/rewards/failing.py:10\)"),
    ],
)
def test_it_refuses_a_function_that_is_wrong(tmp_path, fn, message):
    with pytest.raises(ConfigError, match=message):
        check_run(tmp_path, HERE + fn)


def test_a_function_that_only_fails_is_shown(tmp_path):
    screen = check_run(tmp_path, HERE + "is_away_if_wrong")
    assert "1 for the first row's answer, no value for an empty response (raised: ValueError: could not reach" in screen


def test_it_calls_no_service_and_no_code_of_strangers(tmp_path):
    assert "reward remote:" not in check_run(tmp_path, {"fn": "remote", "url": "http://127.0.0.1:9/get_reward"})
    refuse_code()
    try:
        assert "reward exact_match:" not in check_run(tmp_path, "exact_match")
    finally:
        refuse_code(False)
