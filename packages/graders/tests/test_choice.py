"""Multiple choice: what counts as settling on a letter, and what does not."""

import time

import pytest

from coalign_graders.choice import find_choice, multiple_choice
from tests.rewards.samples import sample

SETTLED = [
    *("The answer is B", "The answer is (B).", "the answer is: **B**", "So the correct option is (b).", "answer is B"),
    *("The correct answer is B, because the others are wrong.", "The answer is B because A or C cannot be."),
    *("The best choice is 'B'", "The right choice: B", "Answer: B", "**Answer:** B", "ANSWER: b.", "**Answer**: B"),
    *("**Final Answer:**\n\n**B**", "#### B", r"\boxed{B}", r"\boxed{\text{B}}", r"$\boxed{\textbf{(B)}}$"),
    *(r"The final answer is $\boxed{B}$.", "The answer is B) Paris", "The answer is B. Paris is the capital."),
    *("B", "(B)", "b", "**B.**", "B) Paris", "B. Paris", "Let me think.\nA is wrong.\n\nB"),
    *("The answer is A. No, wait: the answer is B.", "The answer is B\nAnswer:", "<answer>The answer is B</answer>"),
    *("The answer is\nunclear at first.\nAnswer: B", "A good question. The answer is B"),
]
OPEN = [
    *("", "The answer is A or B", "The answer is A/B.", "The answer is (A), (B)", "The answer is A and C", "Because"),
    *("Answer: A, B, and C", "The answer is Paris", "The answer is Berlin", "The answer is a matter of taste"),
    *(
        "The answer is A train",
        "The answer is B2",
        "The answer is F",
        "A train leaves at noon.",
        "Both are fine:\nA, B",
    ),
    *("The option B is wrong.", "The only other option is C, which is wrong.", r"\boxed{42}", r"\boxed{}"),
    "I think B is likely, but C could be right",
]


@pytest.mark.parametrize("text", SETTLED)
def test_b_is_settled_on(text):
    assert find_choice(text, "ABCDE") == "B"


@pytest.mark.parametrize("text", OPEN)
def test_none_is_settled_on(text):
    assert find_choice(text, "ABCDE") is None


@pytest.mark.parametrize("truth", ["B", "(B)", "b", "B.", "B) Paris", " B ", 1])
def test_notations_of_the_truth(truth):
    assert multiple_choice(sample("Answer: B", answer=truth)) == 1.0
    assert multiple_choice(sample("Answer: C", answer=truth)) == 0.0
    assert multiple_choice(sample("", answer=truth)) == 0.0


def test_thoughts_are_not_read():
    assert multiple_choice(sample("<think>Answer: A</think> Answer: C", answer="C")) == 1.0
    assert multiple_choice(sample("<think>Answer: C</think> I give up", answer="C")) == 0.0


def test_other_choices():
    assert multiple_choice(sample("Answer: 3", answer="3"), choices="1234") == 1.0
    assert multiple_choice(sample("Answer: 3", answer=2), choices="1234") == 1.0
    assert multiple_choice(sample("Answer: J", gold="J"), answer_key="gold", choices="ABCDEFGHIJ") == 1.0
    assert multiple_choice(sample("Answer: E", answer="A"), choices="ABCD") == 0.0


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"gold": "A"}, KeyError, "'answer'.*'gold'"),
        ({"answer": "F"}, ValueError, "'answer' is 'F', none of the choices ABCDE"),
        ({"answer": "A or B"}, ValueError, "'A or B', none of the choices"),
        ({"answer": 5}, ValueError, "'answer' is 5; expected an index from 0 to 4"),
        ({"answer": True}, ValueError, "'True', none of the choices"),
        ({"answer": None}, ValueError, "'answer' is empty"),
    ],
)
def test_a_truth_that_is_none_is_an_error(row, error, message):
    with pytest.raises(error, match=message):
        multiple_choice(sample("Answer: A", **row))


@pytest.mark.parametrize(
    "piece", ["answer is ", "answer: (", "\\boxed{", "#### ", "A ", "(", "the answer is A or ", "\n", "*", "\\text{"]
)
def test_babble_is_read_in_linear_time(piece):
    start = time.process_time()
    multiple_choice(sample(piece * 20_000, answer="A"))
    assert time.process_time() - start < 2.0
