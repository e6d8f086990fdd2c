import pytest
import torch

from coalign.types import Sample
from coalign_graders.services.questions import Pairwise, Pointwise

NONE = torch.zeros(0)


def sample(response, prompt="How far is the moon?", row=None):
    texts = {"prompt": prompt, "response": response}
    return Sample(group=3, index=0, tokens=NONE, loss_mask=NONE, logprobs=NONE, **texts, meta=row or {})


GRADES = {
    "Clear and right. Grade: 10": 1.0,
    "Grade: 1": 0.0,
    "**Grade:** 5.5": 0.5,
    "At first I thought grade: 2, but no.\nGrade: 7": (7 - 1) / 9,
    "GRADE 10/10": 1.0,
} | dict.fromkeys(["Grade: 11", "Grade: -3", "10", "I cannot grade this.", ""])
COMPARISONS = {
    "Both are fine. Verdict: A": 1.0,
    "Verdict: **B**": 0.0,
    "verdict: Tie.": 0.5,
    "Verdict: A? On second thoughts:\nVerdict: B": 0.0,
} | dict.fromkeys(["Verdict: C", "A"])


@pytest.mark.parametrize(
    ("judging", "answer", "verdict"),
    [*((Pointwise, *row) for row in GRADES.items()), *((Pairwise, *row) for row in COMPARISONS.items())],
)
def test_a_verdict_is_read_or_there_is_none(judging, answer, verdict):
    assert judging().verdict(answer) == pytest.approx(verdict)


def test_grades_have_a_scale_of_ones_own():
    judging = Pointwise(low=0, high=5, pattern=r"(\d)/5")
    assert judging.verdict("I give 0/5") == 0.0  # a reward, not a missing one
    assert judging.rewards([NONE] * 3, [0.0, None, 0.4]) == [0.0, None, 0.4]
    (question,) = judging.ask([sample("Far.")])
    assert [message["role"] for message in question] == ["user"]
    assert all(part in question[0]["content"] for part in ("How far is the moon?", "Far.", "0 (useless)", "5 (could"))


def test_a_grade_in_words_is_none():
    judging = Pointwise(pattern=r"grade: (\w*)")
    assert [judging.verdict(f"Grade: {said}") for said in ("10", "ten", "")] == [1.0, None, None]


@pytest.mark.parametrize(
    ("judging", "pattern"),
    [(Pointwise, r"grade: (a+)+b"), pytest.param(Pairwise, r"verdict: ((?:\w+\s?)+)$", marks=pytest.mark.slow)],
)
def test_a_pattern_that_backtracks_finds_no_verdict_and_holds_up_nothing(judging, pattern):
    answer = f"grade: {'a' * 60} verdict: {'word ' * 30}!"
    assert judging(pattern=pattern).verdict(answer) is None
    assert Pointwise(pattern=r"(\d+) of (\d+)").verdict("9 of 9, no, 10 of 10") == 1.0
    with pytest.raises(ValueError, match=r"judge\.pattern is '\(a': missing \)"):
        Pairwise(pattern="(a")


def test_the_prompt_is_shown_as_people_read_it():
    (question,) = Pointwise().ask([sample("Far.", prompt="<|im_start|>user", row={"prompt": "Moon?"})])
    assert "Moon?" in question[0]["content"] and "im_start" not in question[0]["content"]


def test_braces_of_a_response_are_left_alone():
    (question,) = Pointwise(template="{prompt}|{response}").ask([sample("{'x': {prompt}}")])
    assert question[0]["content"] == "How far is the moon?|{'x': {prompt}}"


def test_both_orders_are_asked():
    one, two = Pairwise(template="{first}<{second}").ask([sample("x"), sample("y")])
    assert (one[0]["content"], two[0]["content"]) == ("x<y", "y<x")


@pytest.mark.parametrize(
    ("forth", "back", "rewards"),
    [
        (1.0, 0.0, [1.0, 0.0]),  # x wins in both places
        (0.0, 1.0, [0.0, 1.0]),
        (1.0, 1.0, [0.5, 0.5]),  # whoever stands first wins: nothing was learned of the responses
        (0.0, 0.0, [0.5, 0.5]),
        (0.5, 0.0, [0.75, 0.25]),
        (0.9, 0.3, [0.8, 0.2]),  # probabilities of a preference model
        (None, 0.0, [None, None]),  # with one order alone the bias would stay
        (1.0, None, [None, None]),
    ],
)
def test_a_preference_for_the_first_cancels(forth, back, rewards):
    assert Pairwise().rewards([NONE] * 2, [forth, back]) == pytest.approx(rewards)


def test_the_reward_is_the_share_of_comparisons_won():
    """Of three: 0 beats 1, 0 and 2 tie, what was said of 1 and 2 cannot be read."""
    judging = Pairwise()
    assert judging.matches(3) == [(0, 1), (0, 2), (1, 2)]
    assert judging.rewards([NONE] * 3, [1.0, 0.0, 0.5, 0.5, 1.0, None]) == [0.75, 0.0, 0.5]


@pytest.mark.parametrize("responses", range(7))
@pytest.mark.parametrize("opponents", [None, 1, 2, 5, 9])
def test_everybody_meets_opponents_and_nobody_twice(responses, opponents):
    judging = Pairwise(opponents=opponents)
    matches = judging.matches(responses)
    assert len(judging.ask([sample("x")] * responses)) == 2 * len(matches) == 2 * len(set(matches))
    others = max(0, responses - 1)
    each = others if opponents is None else min(others, 2 * opponents)
    assert [sum(i in pair for pair in matches) for i in range(responses)] == [each] * responses
    assert all(a < b for a, b in matches)


def test_a_response_alone_has_no_reward():
    assert Pairwise().rewards([NONE], []) == [None]


def test_every_response_may_meet_the_text_of_the_row_instead():
    judging = Pairwise(template="{first}<{second}", against="gold")
    group = [sample("x", row={"gold": "z"}), sample("y", row={"gold": "z"})]
    assert [q[0]["content"] for q in judging.ask(group)] == ["x<z", "z<x", "y<z", "z<y"]
    assert judging.rewards(group, [1.0, 0.0, 0.5, 1.0]) == [1.0, 0.25]
    assert judging.rewards(group[:1], [0.0, 1.0]) == [0.0]
    with pytest.raises(KeyError, match=r"judge.against: the row has no 'gold'; it has \['answer'\]"):
        judging.ask([sample("x", row={"answer": "z"})])
    with pytest.raises(KeyError, match="the row has no 'gold'"):
        judging.ask([sample("x", row={"gold": None})])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pointwise(template="{prompt} {answer}"), r"has the field \{answer\}; there are high, low, prompt"),
        (lambda: Pairwise(template="{prompt} {0}"), r"has the field \{0\}"),
        (lambda: Pointwise(low=5, high=5), "from the lower to the higher"),
        (lambda: Pairwise(opponents=0), "compared with one other at least"),
        (lambda: Pairwise(opponents=1, against="answer"), "with others, or with the row's"),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
