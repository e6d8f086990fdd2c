"""The one-line rewards."""

import pytest

from coalign.rewards import contains, exact_match, length_penalty, regex
from tests.rewards.samples import sample


def test_exact_match_and_contains():
    assert exact_match(sample(" Yes\n", answer="Yes")) == 1.0
    assert exact_match(sample("yes", answer="Yes")) == 0.0
    assert exact_match(sample("yes", answer="Yes"), ignore_case=True) == 1.0
    assert exact_match(sample("Yes.", answer="Yes")) == 0.0
    assert contains(sample("I say Yes.", answer="Yes")) == 1.0
    assert contains(sample("I say YES.", answer="Yes")) == 0.0
    assert contains(sample("I say YES.", answer="Yes"), ignore_case=True) == 1.0


@pytest.mark.parametrize("rule", [exact_match, contains])
def test_missing_truth_names_the_key_and_what_there_is(rule):
    with pytest.raises(KeyError, match=r"'label'.*'answer'"):
        rule(sample("x", answer="x"), answer_key="label")
    with pytest.raises(ValueError, match="'answer' is empty: None"):
        rule(sample("x", answer=None))


def test_regex_must_match_the_whole_response():
    pattern = r"<think>.*</think>\s*<answer>.+</answer>"
    assert regex(sample("<think>a\nb</think>\n<answer>5</answer>\n"), pattern=pattern) == 1.0
    assert regex(sample("<think>a</think> <answer>5</answer> and more"), pattern=pattern) == 0.0


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (300, -1.0)])
def test_length_penalty_falls_linearly_over_the_buffer(tokens, expected):
    assert length_penalty(sample(tokens=tokens), max_tokens=100, buffer=20) == expected


def test_length_penalty_refuses_an_impossible_buffer():
    with pytest.raises(ValueError, match="buffer=0"):
        length_penalty(sample(), max_tokens=100, buffer=0)
