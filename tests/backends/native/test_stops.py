"""Stop strings in text that arrives token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalign.backends.engines.request import _StopFinder
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def stop_at(text: str, stops: list[str]) -> int | None:
    """How many of the byte tokens of ``text`` are pushed until a stop is found."""
    finder = _StopFinder(stops, TOKENIZER.decode)
    for i, token in enumerate(TOKENIZER(text)["input_ids"], 1):
        if finder.push(token):
            return i
    return None


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("the answer is 42\n\nnext", ["\n\n"], 18),
        ("aab", ["ab"], 3),
        ("aaab", ["aab"], 4),
        ("one two", ["three", "two"], 7),
        ("x", ["x"], 1),
        ("no end", ["END"], None),
        ("naïve é!", ["é!"], 10),
        ("日本語", ["本"], 6),
    ],
)
def test_the_token_that_completes_a_stop(text, stops, found):
    assert stop_at(text, stops) == found


@given(st.text("ab\u00e9\u65e5 ", max_size=30), st.text("ab\u00e9\u65e5 ", min_size=1, max_size=4))
def test_agrees_with_a_search_of_the_whole_text(text, stop):
    place = text.find(stop)
    expected = None if place < 0 else len(text[: place + len(stop)].encode())
    assert stop_at(text, [stop]) == expected


def test_a_decoder_that_drops_a_leading_space():
    words = {0: " Hello", 1: " wor", 2: "ld", 3: "!"}
    finder = _StopFinder([" world"], lambda ids: "".join(words[i] for i in ids).lstrip())
    assert [finder.push(i) for i in range(4)] == [False, False, True, True]


def test_bytes_that_never_become_a_character_do_not_hide_a_stop():
    broken = TOKENIZER("日")["input_ids"][:1]
    finder = _StopFinder(["ab"], TOKENIZER.decode)
    pushed = broken + TOKENIZER("xab")["input_ids"]
    assert [finder.push(token) for token in pushed] == [False, False, False, True]
