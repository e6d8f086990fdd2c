"""Text of tokens as they come: half characters, stop strings, and the same text as all tokens at once."""

from hypothesis import given
from hypothesis import strategies as st

from coalign_serve.serving.text_stream import TextStream, cut_at_stop
from tests.tiny import tiny_tokenizer


def test_a_character_waits_for_its_last_byte():
    bytes_of = "aé😀b".encode()
    pieces = []
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), pieces.append)
    for byte in bytes_of[:-2]:
        stream.push(byte)
    assert pieces == ["a", "é"]
    for byte in bytes_of[-2:]:
        stream.push(byte)
    assert pieces == ["a", "é", "😀", "b"] and stream.end() == "aé😀b"


def test_a_half_character_at_the_end_is_shown_as_what_it_is():
    pieces = []
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), pieces.append)
    for byte in "aé".encode()[:-1]:
        stream.push(byte)
    assert stream.end() == "a\ufffd" == "".join(pieces)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_the_pieces_of_any_bytes_are_the_text_of_all(tokens):
    decode, pieces = tiny_tokenizer().decode, []
    stream = TextStream(decode, pieces.append)
    for token in tokens:
        stream.push(token)
    assert stream.end() == "".join(pieces) == decode(tokens)


def read(text, stops):
    """The pieces of a text whose tokens are its characters."""
    pieces = []
    stream = TextStream(lambda ids: "".join(map(chr, ids)), pieces.append, stops)
    for character in text:
        stream.push(ord(character))
    assert stream.end() == "".join(pieces)
    return pieces


def test_what_may_begin_a_stop_string_is_held_back():
    assert read("one\n\ntwo", ["\n\n"]) == ["o", "n", "e"]
    assert read("a\nb\n", ["\n\n"]) == ["a", "\nb", "\n"]
    assert read("aabb", ["aab"]) == [] and read("xaabb", ["b", "aab"]) == ["x"]


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_the_text_ends_before_the_first_stop_string(text, stops):
    ends = (n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops))
    assert "".join(read(text, stops)) == cut_at_stop(text[: next(ends, len(text))], stops)  # as an engine ends it
