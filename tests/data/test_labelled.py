"""Single responses with a label, and pairs taken apart."""

import pytest
import torch

from tests.data.reading import TOKENIZER, assistant, batch, chatml, reader, texts, use, user

ASKED = chatml(user("1+1?"), answering=True)
GOOD = {"prompt": "1+1?", "answer": "2", "label": True}
BAD = {"prompt": "1+1?", "answer": "5", "label": False}


def test_labelled_responses():
    made = batch("labelled", GOOD, BAD, {**GOOD, "label": 1}, {**BAD, "label": 0.0})
    assert set(made.sequence) == {"group", "index", "prompt_length", "preference", "rows"}
    assert texts(made)[:2] == [(f"{ASKED}2<|im_end|>", "2<|im_end|>"), (f"{ASKED}5<|im_end|>", "5<|im_end|>")]
    assert made["preference"].tolist() == [1.0, 0.0, 1.0, 0.0] and made["preference"].dtype == torch.float32
    assert made["group"].tolist() == [0, 1, 2, 3] and made["index"].tolist() == [0] * 4
    assert made["prompt_length"].tolist() == [len(TOKENIZER.encode(ASKED))] * 4


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("1+1?")], "answer": [assistant("2")], "label": True},
        {"prompt": "1+1?", "answer": assistant("2"), "label": True},
        {"messages": [user("1+1?"), assistant("2")], "label": True},
        {"prompt": [user("1+1?"), assistant("2")], "label": True},
        {"answer": [user("1+1?"), assistant("2")], "label": True, "prompt": None},
    ],
)
def test_the_usual_formats_mean_the_same(row):
    assert texts(batch("labelled", row)) == texts(batch("labelled", GOOD))


def test_a_pair_becomes_one_of_each():
    made = batch("labelled", {"prompt": "1+1?", "chosen": "2", "rejected": "5"}, GOOD)
    assert texts(made)[:2] == texts(batch("labelled", GOOD, BAD))
    assert made["preference"].tolist() == [1.0, 0.0, 1.0] and made["group"].tolist() == [0, 0, 1]
    examples = reader("labelled")
    assert use(examples, {"prompt": "1+1?", "chosen": "2", "rejected": "2"}) == []
    assert examples.report() == "0 used, 1 with nothing to choose between"


def test_the_classes_are_counted_and_one_alone_is_told():
    examples = reader("labelled")
    use(examples, GOOD, GOOD, BAD, {**BAD, "answer": " "}, {**BAD, "answer": None})
    assert examples.report() == "3 used, 2 empty, 2 desirable, 1 undesirable" and examples.warning() == ""
    examples = reader("labelled")
    use(examples, GOOD, GOOD)
    assert examples.warning() == "none of the 2 usable rows is undesirable"
