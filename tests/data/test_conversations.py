"""Conversations that are too long."""

import pytest

from tests.data.reading import assistant, batch, chatml, reader, texts, use, user
from tests.tiny import CHATML, tiny_tokenizer

TALK = {"messages": [user("a"), assistant("first"), user("b"), assistant("last")]}


def test_earlier_turns_may_be_cut_but_not_the_last_answer():
    cut = lambda n, **more: batch("conversations", TALK, on_long="truncate_left", max_tokens=n, **more)  # noqa: E731
    assert texts(cut(7)) == [("\nlast<|im_end|>\n", "last<|im_end|>")]
    whole, trained = texts(cut(29))[0]
    assert whole.startswith("t<|im_end|>\n<|im_start|>user\nb") and trained == "<|im_end|>last<|im_end|>"
    assert texts(cut(3, train_on="all")) == [("t<|im_end|>\n", "<|im_end|>\n")]
    examples = reader("conversations", on_long="truncate_left", max_tokens=6)
    assert use(examples, TALK, {"prompt": "a", "answer": "b"}) != []
    assert examples.report() == "1 used, 1 over 6 tokens, 1 of these cut to 6 tokens"


def test_a_bos_alone_is_something_before_the_answer():
    tokenizer = tiny_tokenizer(chat_template="{{ bos_token }}" + CHATML, bos_token="<|endoftext|>")
    made = batch("conversations", TALK, tokenizer=tokenizer, on_long="truncate_left", max_tokens=7)
    assert texts(made, tokenizer) == [("<|endoftext|>last<|im_end|>\n", "last<|im_end|>")]


@pytest.mark.parametrize("row", [{"messages": [user("a"), assistant(" ")]}, {"messages": [user("a")]}])
def test_a_conversation_without_an_answer_is_empty(row):
    examples = reader("conversations")
    assert use(examples, row) == [] and examples.report() == "0 used, 1 empty"


@pytest.mark.parametrize("answer", ["b", assistant("b"), [assistant("b")], [assistant("b"), user("never answered")]])
@pytest.mark.parametrize("prompt", ["a", [user("a")]])
def test_a_prompt_and_its_completion_in_every_shape(prompt, answer):
    made = batch("conversations", {"prompt": prompt, "completion": answer}, answer_key="completion")
    assert texts(made) == [(chatml(user("a"), assistant("b")), "b<|im_end|>")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("a"), assistant("b")]},
        {"prompt": [user("a"), assistant("b")]},
        {"messages": [user("a"), assistant("b"), user("never answered")]},
        {"prompt": [user("a")], "answer": "b", "messages": None},
    ],
)
def test_a_conversation_in_every_shape(row):
    assert texts(batch("conversations", row)) == [(chatml(user("a"), assistant("b")), "b<|im_end|>")]
