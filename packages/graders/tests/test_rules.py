"""The one-line rewards."""

import asyncio

import pytest

from coalign.rewards import length_penalty, tags
from coalign_graders.answers import contains, exact_match, f1, regex
from coalign_graders.choice import multiple_choice
from tests.rewards.samples import sample


def test_exact_match_and_contains():
    assert exact_match(sample(" Yes\n", answer="Yes")) == 1.0
    assert exact_match(sample("yes", answer="Yes")) == 0.0
    assert exact_match(sample("yes", answer="Yes"), ignore_case=True) == 1.0
    assert exact_match(sample("Yes.", answer="Yes")) == 0.0
    assert contains(sample("I say Yes.", answer="Yes")) == 1.0
    assert contains(sample("I say YES.", answer="Yes")) == 0.0
    assert contains(sample("I say YES.", answer="Yes"), ignore_case=True) == 1.0


def test_of_a_list_of_truths_any_is_right():
    assert exact_match(sample("b", answer=["a", "b"])) == 1
    assert exact_match(sample("B", answer=("a", "b")), ignore_case=True) == 1
    assert exact_match(sample("['a', 'b']", answer=["a", "b"])) == contains(sample("it is c", answer=["a", "b"])) == 0
    assert contains(sample("it is 2", answer=[1, 2])) == 1.0
    assert multiple_choice(sample("Answer: C", answer=["B", "C"])) == 1.0
    assert multiple_choice(sample("Answer: D", answer=["B", "C"])) == 0.0
    for truths in ([], [""], [None]):
        with pytest.raises(ValueError, match="'answer' is empty"):
            exact_match(sample("", answer=truths))


@pytest.mark.parametrize("rule", [exact_match, contains])
def test_missing_truth_names_the_key_and_what_there_is(rule):
    with pytest.raises(KeyError, match=r"'label'.*'answer'"):
        rule(sample("x", answer="x"), answer_key="label")
    with pytest.raises(ValueError, match="'answer' is empty: None"):
        rule(sample("x", answer=None))


def match(one, pattern):
    return asyncio.run(regex(one, pattern=pattern))


def test_regex_must_match_the_whole_response():
    pattern = r"<think>.*</think>\s*<answer>.+</answer>"
    assert match(sample("<think>a\nb</think>\n<answer>5</answer>\n"), pattern=pattern) == 1.0
    assert match(sample("<think>a</think> <answer>5</answer> and more"), pattern=pattern) == 0.0


def test_a_pattern_that_takes_hours_is_not_matched_and_a_wrong_one_refused(monkeypatch):
    monkeypatch.setattr("coalign_graders.checker.SECONDS", 0.5)
    assert match(sample("a" * 60 + "b"), pattern="(a|aa)+") == 0.0
    with pytest.raises(ValueError, match=r"regex: pattern is '\(': missing \)"):
        match(sample("a"), pattern="(")


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("Paris", "paris.", 1.0),
        ("The Eiffel Tower!", "an Eiffel tower", 1.0),
        ("in Paris, France", "Paris", 0.5),
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
        ("b b", "b", 2 / 3),
        ("London", ["Paris", "London"], 1.0),
        ("1789", 1789, 1.0),
    ],
)
def test_f1(response, truth, expected):
    assert f1(sample(response, answer=truth)) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (300, -1.0)])
def test_length_penalty_falls_linearly_over_the_buffer(tokens, expected):
    assert length_penalty(sample(tokens=tokens), max_tokens=100, buffer=20) == expected


def test_length_penalty_refuses_an_impossible_buffer():
    with pytest.raises(ValueError, match="buffer=0"):
        length_penalty(sample(), max_tokens=100, buffer=0)


GOOD = "<think>2+2 is 4</think>\n<answer>4</answer>"


TAGGED = [GOOD, f"  {GOOD}\n", "<think>a</think><answer><b>4</b></answer>"]
NOT_TAGGED = [
    *("", "4", f"Sure! {GOOD}", f"{GOOD} Bye.", "<think>a</think> so <answer>4</answer>"),
    *("<think></think><answer>4</answer>", "<think>a</think><answer> \n</answer>", "<think>a</think><answer>4"),
    *("<answer>4</answer><think>a</think>", "<think>a<answer>4</answer></think>", "a</think><answer>4</answer>"),
    *("<think>a</think><think>b</think><answer>4</answer>", "<think>a</think><answer>4</answer><answer>5</answer>"),
    *("<think>I write <answer> next</think><answer>4</answer>", "</think><think>a<answer>4</answer>"),
    "<Think>a</Think><answer>4</answer>",
]


@pytest.mark.parametrize("response", TAGGED + NOT_TAGGED)
def test_tags_once_each_in_order_and_nothing_else(response):
    assert tags(sample(response)) == (response in TAGGED)


def test_tags_with_other_names_and_rules():
    assert tags(sample("<plan>x</plan>"), tags=["plan"]) == 1.0
    assert tags(sample("a</think><answer>4</answer>"), opened=True) == 1.0
    assert tags(sample(GOOD), opened=True) == 0.0
    assert tags(sample(f"Sure! {GOOD} Bye."), text_outside=True) == 1.0
    assert tags(sample("<answer>4</answer> x <think>a</think>"), text_outside=True) == 0.0
