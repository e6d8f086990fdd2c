"""The final-answer check, on hand-made cases and on all of GSM8K."""

import json
import time
from importlib import import_module

import pytest

from coalign.rewards import math
from coalign.rewards.math_answer import final_answer, number, same_answer
from tests.gsm8k import DIRECTORY, needs_gsm8k
from tests.rewards.samples import sample


def lines(name):
    return [json.loads(line) for line in (DIRECTORY / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 40+32=72\n#### 72", "72"),
        ("#### 1\nno wait\n#### 72\n", "72"),
        (r"thus \boxed{72}.", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"The answer is $\boxed{5}$.", "5"),
        (r"#### \boxed{5}", "5"),
        (r"\boxed{3} so the final answer: 4", "4"),
        ("The answer is 72 clips.", "72 clips."),
        ("Final answer: 72", "72"),
        ("steps\nA: 26", "26"),
        ("steps\n**Answer:** 26", "** 26"),
        ("Answer: 26\n#### ", "26"),
        (r"#### 26 \boxed{2", "26 \\boxed{2"),
    ],
)
def test_the_last_mark_leads_to_the_answer(text, expected):
    assert final_answer(text) == expected


def test_without_a_mark_the_last_number_counts_unless_strict():
    text = "48 in April, 24 in May, so 1,072 in all."
    assert final_answer(text) is None
    assert final_answer(text, last_number=True) == "1,072"
    assert math(sample(text, answer="#### 1072")) == 1.0
    assert math(sample(text, answer="#### 1072"), strict=True) == 0.0
    assert math(sample("The answer is 1072", answer="1072"), strict=True) == 0.0
    assert math(sample(r"\boxed{1072}", answer="1072"), strict=True) == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", "72"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        (r"1\!,000", "1000"),
        ("1,000,000.50", "1000000.5"),
        ("$5.00", "5"),
        (r"\$5", "5"),
        ("-3", "-3"),
        ("- 3", "-3"),
        ("−3", "-3"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("1/2", "1/2"),
        ("-1/2", "-1/2"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\frac34", "3/4"),
        (r"1\frac{1}{2}", "3/2"),
        ("1 1/2", "3/2"),
        (".5", "1/2"),
        ("18.", "18"),
        ("18 dollars", "18"),
        (r"18\text{ dollars}", "18"),
        ("18 square feet per day", "18"),
        ("90°", "90"),
        ("x = 7", "7"),
        ("9 * 2 = 18", "18"),
        ("** 26", "26"),
        ("$18$", "18"),
        (r"\(18\)", "18"),
        ("She makes $18 a day for 3 days", "18"),
        ("-33.3 billion", "-33.3"),
    ],
)
def test_notations_of_a_number(text, value):
    from fractions import Fraction

    assert number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "2+2",
        "2 + 2",
        "6/0",
        "2*2",
        "2^2",
        r"\sqrt{4}",
        r"2\pi",
        "(1, 2)",
        "x + 2",
        "16-3-4",
        "3/x",
        "9" * 500,
    ],
)
def test_expressions_are_no_numbers(text):
    assert number(text) is None


def test_percent_is_a_unit():
    assert same_answer("50%", "50") and same_answer("50", "50%")
    assert not same_answer("50%", "0.5")


def test_thousands_are_not_lists():
    assert same_answer("1000", "1,000") and not same_answer("1000", "1,00") and not same_answer("1", "1,000")


def test_equal_only_if_exactly_equal():
    assert same_answer("0.5", "1/2") and same_answer("3", "3.000")
    assert not same_answer("1/3", "0.333") and not same_answer("72", "-72") and not same_answer("72", "7.2")


def test_a_formula_does_not_pay_for_a_number():
    assert math(sample(r"\boxed{2+2}", answer="4")) == 0.0
    assert math(sample(r"\boxed{\sqrt{16}}", answer="4")) == 0.0


def test_words_match_without_computer_algebra(monkeypatch):
    monkeypatch.setattr(import_module("coalign.rewards.math_answer"), "equivalent", None)
    assert math(sample("The answer is Paris.", answer="paris")) == 1.0
    assert math(sample("Answer: B", answer="C")) == 0.0


def test_reading_starts_behind_the_thoughts():
    assert math(sample("<think>#### 5</think> It is 6", answer=6)) == 1.0


def test_the_answer_may_be_a_number_in_the_row():
    assert math(sample("#### 6", answer=6)) == math(sample("#### 6.5", answer=6.5)) == 1.0
    assert math(sample("#### 6", gold=6), answer_key="gold") == 1.0


def test_a_row_without_truth_is_an_error():
    with pytest.raises(KeyError, match=r"'answer'.*'question'"):
        math(sample("#### 6", question="?"))
    with pytest.raises(ValueError, match="'answer' is empty"):
        math(sample("#### 6", answer=" "))


def test_empty_and_endless_responses_are_wrong():
    assert math(sample("", answer="1")) == math(sample("1" * 5000, answer="1")) == 0.0
    assert math(sample("#### " + "1" * 5000, answer="1")) == math(sample("####", answer="1")) == 0.0


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "#### ", "the answer is ", "A:", "\n", "1,", "1", "{", "$", "\\frac{1}{2}", "- "]
)
def test_babble_is_read_in_linear_time(piece):
    start = time.process_time()
    math(sample(piece * 20_000, answer="1"))
    assert time.process_time() - start < 1.0


@needs_gsm8k
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
def test_every_gsm8k_solution_is_right(split):
    rows = lines(f"gsm8k_{split}.jsonl")
    wrong = [row["answer"] for row in rows if math(sample(row["answer"], answer=row["answer"]), strict=True) != 1.0]
    assert not wrong
    final = [row["answer"].split("####")[1].strip() for row in rows]
    for form in ("The answer is {}.", r"\boxed{{{}}}", "${}", "so we get {}", "#### {}.00", "Answer: {} clips"):
        assert all(math(sample(form.format(answer), answer=answer)) == 1.0 for answer in final), form
    assert all(math(sample(f"#### 1{a}", answer=a)) == 0.0 for a in final if a[0] != "-")


@needs_gsm8k
def test_agrees_with_the_labels_of_gsm8k_model_solutions():
    """5276 solutions of four models with OpenAI's labels."""
    disagree = []
    for row in lines("gsm8k_model_solutions.jsonl"):
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            solution, label = row[model]["solution"], row[model]["is_correct"]
            if bool(math(sample(solution, answer=row["ground_truth"]))) != label:
                disagree.append((label, row["ground_truth"].split("\n")[-1], solution.split("\n")[-1]))
    assert not disagree
