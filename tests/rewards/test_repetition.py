"""Repetition and script, by hand."""

import pytest

from coalign.rewards import repetition_penalty, script
from tests.rewards.samples import sample


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b", 2, -1 / 3),  # ab ba ab: one of three stood there before
        ("a a a a a", 2, -3 / 4),
        ("so so, SO!", 1, -2 / 3),
        ("a b a b", 4, 0.0),
        ("a b", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repeated_ngrams_of_words(text, n, expected):
    assert repetition_penalty(sample(text), n=n) == pytest.approx(expected)


def test_repeated_ngrams_of_characters():
    # 我爱 爱你 你我 我爱 爱你: two of five
    assert repetition_penalty(sample("我爱你 我爱你"), n=2, unit="characters") == pytest.approx(-2 / 5)


def test_endless_repetition_tends_to_minus_one():
    values = [repetition_penalty(sample("no way out " * times)) for times in (3, 20, 2000)]
    assert 0 > values[0] > values[1] > values[2] > -1 and values[2] < -0.999


@pytest.mark.parametrize(
    ("text", "scripts", "expected"),
    [
        ("Hello, world 42!", ["LATIN"], 1.0),
        ("да yes", ["latin"], 3 / 5),
        ("да yes", ["LATIN", "CYRILLIC"], 1.0),
        ("你好 hi", ["CJK"], 0.5),
        ("42 + 1 = 43", ["LATIN"], 1.0),
        ("", ["LATIN"], 1.0),
        ("été", ["CYRILLIC"], 0.0),
    ],
)
def test_script_is_a_share_of_letters(text, scripts, expected):
    assert script(sample(text), scripts=scripts) == pytest.approx(expected)
