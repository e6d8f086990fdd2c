"""Random texts, structures and sizes for every reward and every reader of a response: a number, never an error.

The fast suite makes 500 cases, the slow one 10,000. Only what is documented may be raised, and nothing may take longer
than its limit.
"""

import asyncio
import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coalign.companions import REWARDS
from coalign.config.functions import resolve
from coalign.rewards.calls import RewardFailure, RewardFunction, _read_outcomes
from coalign_graders import answers, choice, math_answer
from coalign_graders.choice import find_choice
from coalign_graders.code import extract_code
from coalign_graders.equality import is_same
from coalign_graders.layout import LONGEST, simplify_notation
from coalign_graders.math_answer import find_answer, is_same_answer
from coalign_graders.notation import read_answer
from coalign_graders.services.questions import Pairwise, Pointwise
from tests.rewards.samples import sample

SECONDS = 2.0  # of processor time for a text of this file; usual ones take a millisecond

PIECES = [
    *(*"0123456789.,;:+-*/^_=<>()[]{}|&!?%$#~`'\"\\ \n\t", *"abixnyABCDEF√π∞±≤≥≠∪°²−×·½٣é中\u200b\x00\ud800"),
    *(r"\boxed{", r"\frac{", r"\frac12", r"\sqrt{", r"\text{", r"\left(", r"\right)", r"\begin{pmatrix}", r"\\", "}{"),
    *(r"\end{pmatrix}", r"\pm", r"\cup", r"\in", r"\le ", r"\infty", r"\cdot ", r"^\circ", r"\{", r"\}", r"\!", r"\%"),
    *("####", "The answer is ", "answer: ", "A: ", "<answer>", "</answer>", "<think>", "</think>", "```python\n"),
    *("```", " and ", " or ", "cm", " dollars", "million", "1,000", "1 000", "10^", "9" * 50, "1e999", "(base 8)"),
    *("0x", "x = ", "correct", "because ", "grade: ", "verdict: ", "Paris", "B) ", "no ", "less than ", "sin x"),
    *("f(x)", "1/0", "0.(3)"),
]


def make_texts(longest):
    """Short mixtures of pieces, any text, and one or two pieces again and again."""
    piece, count = st.sampled_from(PIECES), st.integers(1, longest)
    return st.one_of(
        st.lists(piece, max_size=40).map("".join),
        st.text(max_size=200),
        st.tuples(piece, count, piece).map(lambda drawn: drawn[0] * drawn[1] + drawn[2]),
        st.tuples(piece, piece, count).map(lambda drawn: (drawn[0] + drawn[1]) * drawn[2]),
    )


def make_truths(texts):
    known = ["72", "1/2", r"\frac{1}{2}", "(1, 2]", "1, 2, 3", "x > 5", "204_5", "Paris", "B", "3:2", "5 cm"]
    return st.one_of(st.sampled_from(known), texts.filter(lambda text: bool(text.strip())))


SHORT, LONG = make_texts(200), make_texts(30_000)
PLAIN = {  # rewards that are no more than a number for a text
    "exact_match": {},
    "contains": {"ignore_case": True},
    "f1": {},
    "tags": {},
    "repetition_penalty": {"n": 2},
    "script": {"scripts": ["LATIN"]},
    "length_range": {"max_tokens": 3},
    "length_target": {"target": 3, "tolerance": 2},
    "length_penalty": {"max_tokens": 4, "buffer": 2},
}
VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), SHORT, st.just(b"\xff")),
        st.booleans().map(lambda sign: (-1) ** sign * 10**5000),  # which has no text
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=5,
)


def read_everything(response, truth):
    """Have all rewards and readers that work in this process read a response."""
    one = sample(response, answer=truth)
    for name, arguments in PLAIN.items():
        assert math.isfinite(resolve(name, REWARDS)(one, **arguments)), name
    assert choice.multiple_choice(sample(response, answer="B")) in (0.0, 1.0)
    for text in (response, truth):
        find_choice(text, "ABCDE")
        extract_code(text)
        for strict in (False, True):
            answer = find_answer(text, strict=strict, last_number=not strict)
            assert answer is None or answer.strip()
        assert Pointwise().verdict(text) is None or 0.0 <= Pointwise().verdict(text) <= 1.0
        assert Pairwise().verdict(text) in (None, 0.0, 0.5, 1.0)
        short = text[:LONGEST]
        read_answer(simplify_notation(short))
        assert isinstance(is_same(short, short, lambda *_: False), bool)
    assert isinstance(is_same(truth, response, lambda *_: False), bool)


def check_plain(response, truth):
    begun = time.process_time()
    read_everything(response, truth)
    assert time.process_time() - begun < SECONDS


def check_values(value, takes_many):
    function = RewardFunction("f", (lambda samples: value) if takes_many else (lambda one: value))
    for outcome in _read_outcomes(function, value, 2 if takes_many else 1):
        if isinstance(outcome, RewardFailure):
            assert len(str(outcome)) < 2000
        else:
            assert all(math.isfinite(entry) for entry in outcome.values())


def check_answers(gold, predicted):
    begun = time.monotonic()
    assert isinstance(is_same_answer(gold, predicted), bool)
    reward = asyncio.run(math_answer.math(sample(predicted, answer=gold)))
    assert reward in (0.0, 1.0)
    assert time.monotonic() - begun < 60  # two checks of five seconds, and starting their processes anew


SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("check", "examples", "strategies"),
    [
        (check_plain, 200, (SHORT, make_truths(SHORT))),
        (check_values, 250, (VALUES, st.booleans())),
        (check_answers, 50, (make_truths(SHORT), SHORT)),
        pytest.param(check_plain, 6000, (LONG, make_truths(LONG)), marks=SLOW),
        pytest.param(check_values, 3000, (VALUES, st.booleans()), marks=SLOW),
        pytest.param(check_answers, 1000, (make_truths(LONG), LONG), marks=SLOW),
    ],
)
def test_a_number_never_an_error(check, examples, strategies):
    run = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    run(given(*strategies)(check))()


BLANKS = ["```" + " " * 100, " " * 1000 + "\n"]


@pytest.mark.parametrize("piece", ["```", "```x", " ", "\t", "```\n", "`", "x```", " ```", *BLANKS])
def test_fences_are_found_in_linear_time(piece):
    begun = time.process_time()
    babble = piece * (600 if piece in BLANKS else 60_000)
    extract_code(babble)
    extract_code("```" + babble + "```")
    assert time.process_time() - begun < SECONDS


def test_surrogates_and_null_reach_the_checker():
    assert asyncio.run(answers.regex(sample("a\ud800\x00"), pattern="a..")) == 1.0
    assert json.loads(json.dumps("\ud800")) == "\ud800"
