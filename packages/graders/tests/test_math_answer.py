"""The final-answer check, on hand-made cases, on truths of MATH-like sets and on all of GSM8K."""

import asyncio
import importlib.util
import json
import time
from fractions import Fraction

import pytest

from benchmarks.graders import make_right, make_wrong, read_answers, read_pairs
from coalign_graders.equality import is_same
from coalign_graders.layout import simplify_notation
from coalign_graders.math_answer import find_answer, is_same_answer
from coalign_graders.math_answer import math as math_reward
from coalign_graders.notation import read_answer
from tests.gsm8k import DIRECTORY, needs_gsm8k
from tests.rewards.samples import sample

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra [math]")


RUNNER = asyncio.Runner()


def math(one, **settings):
    return RUNNER.run(math_reward(one, **settings))


def number(text):
    node = read_answer(simplify_notation(text))
    while node.type == "relation":
        node = node.children[-1]
    return node.value if node.type == "number" else None


def same_text(gold, predicted):
    """Compared without computer algebra: expressions differ."""
    return is_same(gold, predicted, lambda *_: False)


def lines(name):
    return [json.loads(line) for line in (DIRECTORY / name).read_bytes().splitlines()]


FOUND = [
    ("72", ["so 40+32=72\n#### 72", "#### 1\nno wait\n#### 72\n", r"thus \boxed{72}.", "Final answer: 72"]),
    (r"\frac{1}{2}", [r"\boxed{\frac{1}{2}}"]),
    ("7", [r"\boxed {7}"]),
    ("5", [r"The answer is $\boxed{5}$.", r"#### \boxed{5}", r"\boxed{\boxed{5}}", r"\boxed 5 $", r"\fbox{5}"]),
    ("5", ["The answer is 5. The answer is correct."]),
    ("42", [r"\boxed{42}. The answer is correct.", r"\boxed{42}, and the answer is: as expected"]),
    ("42", ["The answer is 42 since it is", "The answer is 42, because 6 * 7 = 42.", "<answer>42</answer> and so on"]),
    ("1, 2", [r"\boxed{1} and \boxed{2}"]),
    ("(1, 2), (2, 1)", [r"$\boxed{(1, 2)}, \boxed{(2, 1)}$"]),
    ("2", [r"first \boxed{1}, then, after all, \boxed{2}"]),
    ("3", [r"\boxed{3} so the final answer: 4", r"\boxed{3} is what I had, but \boxed{5"]),
    ("72 clips", ["The answer is 72 clips."]),
    ("26", ["steps\nA: 26", "steps\n**Answer:** 26", "Answer: 26\n#### ", r"#### 26 \boxed{2"]),
    (None, [r"\boxed{5", r"The answer is \boxed{5", "The answer is correct."]),
    (None, ["The answer is clearly right: see above"]),
]


@pytest.mark.parametrize(("expected", "texts"), FOUND)
def test_the_last_mark_leads_to_the_answer(expected, texts):
    assert {text: find_answer(text) for text in texts} == dict.fromkeys(texts, expected)


def test_without_a_mark_the_last_number_counts_unless_strict():
    text = "48 in April, 24 in May, so 1,072 in all."
    assert find_answer(text) is None
    assert find_answer(text, last_number=True) == "1,072"
    assert find_answer("so 2^10", last_number=True) is find_answer("3 * 4", last_number=True) is None
    assert math(sample(text, answer="#### 1072")) == 1.0
    assert math(sample(text, answer="#### 1072"), strict=True) == 0.0
    assert math(sample("The answer is 1072", answer="1072"), strict=True) == 0.0
    assert math(sample(r"\boxed{1072}", answer="1072"), strict=True) == 1.0


NUMBERS = r"""
    72 ;; 72
    1000 ;; 1,000 ;; 1{,}000 ;; 1\!,000 ;; 1 000
    1000000.5 ;; 1,000,000.50
    5 ;; $5.00 ;; \$5 ;; {5}
    -3 ;; -3 ;; - 3 ;; −3 ;; -$3 ;; $-3
    50 ;; 50% ;; 50\%
    1/2 ;; 1/2 ;; .5
    -1/2 ;; -1/2
    3/4 ;; \frac{3}{4} ;; \frac34
    -3/4 ;; -\dfrac{3}{4}
    3/2 ;; 1\frac{1}{2} ;; 1 1/2
    18 ;; 18. ;; 18 dollars ;; 18\text{ dollars} ;; 18 square feet per day ;; 9 * 2 = 18 ;; $18$ ;; \(18\)
    18 ;; She makes $18 a day
    90 ;; 90°
    7 ;; x = 7
    -33300000000 ;; -33.3 billion
    1000000 ;; 10^6
    4500 ;; 4.5 \times 10^{3}
    4500000000000000000000000000000000 ;; 4.5e33
    45 ;; 45^\circ
    864 ;; 864 \mbox{ inches}^2
    """


def read_table(table):
    """Each line is a truth, then equal answers behind `;;`, then others behind `!=`."""
    for line in table.strip().splitlines():
        equal, _, others = line.partition(" != ")
        truth, *equal = equal.strip().split(" ;; ")
        yield truth, equal, others.split(" ;; ") if others else []


@pytest.mark.parametrize(("value", "notations", "_"), read_table(NUMBERS))
def test_notations_of_a_number(value, notations, _):
    assert {text: number(text) for text in notations} == dict.fromkeys(notations, Fraction(value))


NO_NUMBERS = r"""
    |none|2+2|2 + 2|6/0|2*2|2^2|\sqrt{4}|2\pi|(1, 2)|x + 2|16-3-4|3/x|5 3|5 apples and 3 pears|less than 5|5 or more
    |2k|5ab|3i|204_5|1e99999|10^{10^9}
    """


@pytest.mark.parametrize("text", [text.strip() for text in NO_NUMBERS.split("|")])
def test_expressions_are_no_numbers(text):
    assert number(text) is None


WITHOUT_ALGEBRA = r"""
    50% ;; 50 != 0.5
    1000 ;; 1,000 != 1,00
    0.5 ;; 1/2
    3 ;; 3.000
    1/3 ;; 0.333333 != 0.333
    45 ;; 45^\circ
    1, 2, 3 ;; 3, 2, 1
    \{1, 2\} ;; 2 and 1
    (1, 2) ;; 1, 2 != (2, 1) ;; [1, 2) ;; \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
    x = 5 ;; 5 != y = 5
    5 ;; n = 5 != 5ab ;; less than 5
    x > 5 ;; 5 < x != 5 ;; x<5
    x \ge 2 ;; [2, \infty)
    (0,9) \cup (9,36) ;; (9, 36) \cup (0, 9)
    x \in [-2,7] ;; -2 \le x \le 7
    3:2 ;; 6:4 != 3:5
    204_5 ;; 204_{5} != 204_7 ;; 204
    52_8 ;; 52 \text{ (base 8)}
    x=6, y=5 ;; y=5, x=6 ;; (6, 5) != 5, 6
    p=5,q=2;p=7,q=2 ;; (7,2),(5,2)
    \begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} ;; \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
    \text{Evelyn} ;; evelyn
    \text{(B)} ;; B
    5 cm ;; 5 centimeters != 5 km
    15\mbox{ cm}^2 ;; 15 square cm
    1000.99 ;; 1000,99 != 1000,9
    42 ;; forty-two (42) ;; \boxed{42} != forty-two (43)
    1,200,017 ;; one million two hundred thousand and seventeen
    9 days ;; nine days
    \$15 ;; 15 != 15 cents
    75\text{ cents} ;; 75¢
    250\text{ g} ;; 250 g
    250 g != 250 kg
    60\text{ mph} ;; 60 miles per hour
    60 mph != 60 kilometers per hour
    \frac16 ;; 0.1\overline{6}
    (-\infty,-2]\cup[5,\infty) ;; x \le -2 \text{ or } x \ge 5 != x \le -2 \text{ or } x > 5
    (-\infty,0)\cup(0,\infty) ;; x \neq 0 != x \neq 1
    \{x \mid x > 2\} ;; (2,\infty)
    (-\infty,\infty) ;; x \in \mathbb{R}
    \emptyset ;; \{\} ;; x<4 \text{ and } x\ge 9 != \{\emptyset\}
    \begin{pmatrix} 2 \\[1ex] -1 \end{pmatrix} ;; \langle 2, -1 \rangle
    321_4 ;; 321_{\text{four}}
    \textbf{(C)}\ 12 ;; C != \textbf{(D)}\ 12 ;; \textbf{(C)}\ 13
    3:15 p.m. ;; 3:15 PM != 3:15 AM
    5:2 ;; 5 \text{ to } 2
    P(2, 5) ;; (2, 5) != Q(2, 5)
    (4, 9] ;; x>4 \text{ and } x\le 9 != x>4 \text{ or } x\le 9
    (\sqrt2, 3) ;; x < 3 \text{ and } x > \sqrt2
    (-\infty,4)\cup[9,\infty) ;; x<4, x≥9 != x<4 and x≥9
    [0,1)\cup(1,3] ;; 0\le x\le 3, x\ne 1
    (0,1)\cup(2,3) ;; 0<x<1 \text{ or } 2<x \text{ and } x<3
    x\in(-1,1] ;; \left]-1,1\right] != \left]-1,1\right[
    n \equiv 3 \pmod{7} ;; 10 \pmod 7 != 3 \pmod 8
    (\pm1, \pm2) ;; (1,2),(1,-2),(-1,2),(-1,-2) != (1,2),(-1,-2)
    f(x)=\begin{cases}x&x\ge0\\-x&x<0\end{cases} ;; \begin{cases}-x & \text{if } x<0\\x & x\ge0\end{cases}
    March 3 ;; March 3rd
    (-\infty,2)\cup(2,\infty) ;; \mathbb{R}\setminus\{2\}
    1011_2 ;; 1011_{(2)}
    f^{-1}(x) = 2 ;; 2
    x \approx 3.14 ;; 3.14
    1 != 1,000
    72 != -72 ;; 7.2
    x \geq 5 != x \leq 5
    -2,1 != -2,5 ;; -2,1,5
    4.5e33 != 4.5e34
    8 != 5 3
    2 != 2k
    (3, 1) != 1, 3
    15 cm^2 != 15 cm^3
    0.0000672 != 0.0000673
    a != A
    Paris != Rome
    three != three or four
    18,000 != 18.000
    €30 != \$30
    0.63 != 0.\overline{63}
    \{\{1, 2\}, \{3\}\} != \{1, 2, 3\}
    (2, 5) != \{2, 5\}
    a_1 != A_1
    x<4 \text{ or } x\ge 9 != x<4 \text{ and } x\ge 9
    5_{a} != 5_{b}
    2^{10} != 2^{1}0
    \begin{cases}x&x\ge0\\-x&x<0\end{cases} != \begin{cases}x&x\ge0\\x&x<0\end{cases}
    """
BY_ALGEBRA = r"""
    \frac{\sqrt{2}}{2} ;; \frac{1}{\sqrt 2}
    x^2 + 2x + 1 ;; (x+1)^2
    \frac{\pi}{2} != \frac{\pi}{3}
    2x-3 != 2x-7
    2A != 2a
    \frac{1}{2004!} != \frac{1}{2006!}
    \lceil n/2 \rceil != \lceil n/3 \rceil
    1 \pm \sqrt{19} ;; 1 - \sqrt{19}, 1 + \sqrt{19}
    2x+4y-3=0 ;; y=-\frac{1}{2}x+\frac{3}{4} != y=\frac{1}{2}x+\frac{3}{4}
    x < 1 ;; -x > -1 != -x < -1
    \sqrt{17} ;; 4.123106 != 4.1232
    (1+i)^2 ;; 2i
    \cos 60^\circ + x ;; x + \frac12
    (\sqrt2, \sqrt3) != (\sqrt3, \sqrt2)
    7 = 11a + c != 11a + c
    5_{a} != 5_{b}
    |x| < 3 != x < 3
    \sqrt{x^2} != x
    4\sqrt{3}\text{ cm} ;; 4\sqrt3 != 4\sqrt3\text{ m}
    2\operatorname{cis} 90^\circ ;; 2i
    """


@pytest.mark.parametrize(("truth", "equal", "others"), read_table(WITHOUT_ALGEBRA))
def test_answers_without_algebra(truth, equal, others):
    found = {answer: (same_text(truth, answer), same_text(answer, truth)) for answer in equal + others}
    assert found == dict.fromkeys(equal, (True, True)) | dict.fromkeys(others, (False, False))


@needs_math_verify
@pytest.mark.parametrize(("truth", "equal", "others"), read_table(BY_ALGEBRA))
def test_answers_by_algebra(truth, equal, others):
    found = {answer: is_same_answer(truth, answer) for answer in equal + others}
    assert found == dict.fromkeys(equal, True) | dict.fromkeys(others, False)


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize("name", read_answers())
def test_few_wrong_answers_are_paid_and_few_right_ones_refused(name):
    """The goals of docs/rewards.md: at most 0.5 % and 1 %, on truths of MATH-like sets."""
    truths = read_answers()[name]
    wrong, right = ([(truth, one) for truth in truths for one in make(truth)] for make in (make_wrong, make_right))
    paid, refused = [p for p in wrong if is_same_answer(*p)], [p for p in right if not is_same_answer(*p)]
    assert len(paid) <= 0.005 * len(wrong) and len(refused) <= 0.01 * len(right), (paid, refused)


@needs_math_verify
@pytest.mark.slow
def test_pairs_of_authors_of_other_graders_and_of_our_own():
    """No wrong answer is paid. Refused are formulas, what is only near 11, a determinant and other forms."""
    pairs = [pair for pair in read_pairs() if not pair[0].endswith("responses")]
    wrong = [(gold, one) for _, gold, one, equal in pairs if is_same_answer(gold, one) != equal]
    expected = ["(1,1,1)", "10", "11", "1\\leq|z", *3 * ["\\begin{"]]
    assert sorted(gold[:7] for gold, _ in wrong) == expected, wrong


@needs_math_verify
def test_answers_in_responses():
    pairs = [pair for pair in read_pairs() if pair[0].endswith("responses")]
    assert not is_same_answer(r"2\sqrt{3}", "")
    assert not [pair for pair in pairs if math(sample(pair[2], answer=pair[1])) != pair[3]]


def test_what_is_near_a_value_pays_only_for_a_decimal():
    assert not same_text("x = 2", r"x \approx 2") and not same_text("2", r"\approx 2.0")
    assert same_text(r"x \approx 2", "x = 2") and same_text("0.33", r"x \approx 0.33")
    assert same_text("1/3", r"x = \frac{1}{3} \approx 0.33")


def test_a_formula_does_not_pay_for_a_number():
    assert math(sample(r"\boxed{2+2}", answer="4")) == 0.0
    assert math(sample(r"\boxed{\sqrt{16}}", answer="4")) == 0.0


def test_words_match_without_another_process(monkeypatch):
    monkeypatch.setattr("coalign_graders.math_answer.check", None)
    assert math(sample("The answer is Paris.", answer="paris")) == 1.0
    assert math(sample("Answer: B", answer="C")) == 0.0


def test_reading_starts_behind_the_thoughts():
    assert math(sample("<think>#### 5</think> It is 6", answer=6)) == 1.0


def test_a_thought_that_the_prompt_opens_is_no_answer():
    for response, expected in [("so it is 2", 0.0), ("so it is 1</think> 2", 1.0), ("it is 2</think> 1", 0.0)]:
        said = sample(response, answer="2")
        said.prompt = "<|im_start|>assistant\n<think>\n"
        assert math(said) == expected


@pytest.mark.parametrize("response", ["<think>2", r"<think>\boxed{2}", "<think>1</think><think>#### 2", "<thinking>2"])
def test_thoughts_that_are_not_finished_are_no_answer(response):
    assert math(sample(response, answer="2")) == 0.0
    assert math(sample(f"It is 2. {response}", answer="2")) == float("</think>" not in response)


def test_of_a_list_of_truths_any_is_right():
    assert math(sample(r"\boxed{0.5}", answer=[r"\frac12"])) == 1.0
    rewards = {one: math(sample(rf"\boxed{{{one}}}", answer=["1", "#### 2"])) for one in ("1", "2", "3", "1, 2")}
    assert rewards == {"1": 1, "2": 1, "3": 0, "1, 2": 0}
    assert math(sample("#### 2", answer=(1, 2))) == 1.0
    assert math(sample("#### 1", answer='["1", "2"]')) == 0.0  # a text is one truth


def test_boxes_and_digits_of_other_kinds():
    assert math(sample("\\boxed{5}.\n\n\\boxed{5}", answer="5")) == 1.0
    assert math(sample(r"So 5 it is: \boxed{}", answer="5")) == math(sample("So x < 5", answer="5")) == 0.0
    assert math(sample("**5**", answer="5")) == math(sample(r"\boxed{\text{5 apples}}", answer="5")) == 1.0
    for response in ("#### １２", "答案是 １２。", r"\boxed{１２}", "The answer is １２."):
        assert math(sample(response, answer="12")) == 1.0


def test_the_answer_may_be_a_number_in_the_row():
    assert math(sample("#### 6", answer=6)) == math(sample("#### 6.5", answer=6.5)) == 1.0
    assert math(sample("#### 6", gold=6), answer_key="gold") == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "'answer'.*'question'"),
        ({"answer": " "}, "'answer' is empty"),
        ({"answer": []}, "'answer' is empty"),
        ({"answer": ["1", ""]}, "'answer' is empty"),
        ({"answer": [["1"]]}, "'answer' .*expected a text, a number, or a list"),
    ],
    ids=str,
)
def test_a_row_without_truth_is_an_error(row, message):
    with pytest.raises((KeyError, ValueError), match=message):
        math(sample("#### 6", **row))


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
