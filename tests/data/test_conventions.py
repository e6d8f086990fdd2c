"""Columns as well-known datasets have them, and what is said of others."""

from pathlib import Path

import pytest

from coalign.data.reader import CONVENTIONS
from tests.data.reading import TOKENIZER, batch, chatml, reader, texts, use
from tests.data.reading import assistant as said
from tests.data.reading import user as asked

ANSWERED = chatml(asked("1 + 1?"), said("2"))


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1 + 1?", "answer": "2"},
        {"query": "1 + 1?", "response": "2", "type": "x"},
        {"problem": "1 + 1?", "answer": "2", "solution": "because"},
        {"problem": "1 + 1?", "solution": "2", "level": 1},
        {"prompt": "1 + 1?", "completion": "2"},
        {"prompt": [asked("1 + 1?")], "completion": [said("2")]},
        {"instruction": "1 + 1?", "input": "", "output": "2", "text": "all of it"},
        {"instruction": "1 + 1?", "context": None, "response": "2", "category": "sums"},
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2", "weight": None}]},
        {"conversations": [asked("1 + 1?"), said("2")]},
        {"messages": [asked("1 + 1?"), said("2")], "ground_truth": "3", "dataset": "gsm8k"},
    ],
    ids=lambda row: "-".join(row),
)
def test_conventions_of_prompts_and_answers(row):
    made = batch("conversations", row)
    assert [text.removesuffix("\n") for text, _ in texts(made)] == [ANSWERED.removesuffix("\n")]
    assert texts(made)[0][1].startswith("2")


def test_an_input_follows_its_instruction():
    made = batch("prompts", {"instruction": "Add.", "input": "1 + 1", "output": "2"})
    assert TOKENIZER.decode(made["tokens"]) == chatml(asked("Add.\n\n1 + 1"), answering=True)


def test_rewards_see_the_reference_under_our_name():
    made = batch(
        "prompts",
        {"question": "1 + 1?", "answer": "one and one\n#### 2"},
        {"messages": [asked("1 + 1?")], "ground_truth": "2"},
    )
    gsm8k, tulu = made["rows"]
    assert gsm8k["answer"].endswith("#### 2") and gsm8k["prompt"] == "1 + 1?" and tulu["answer"] == "2"


def test_ultrafeedback_as_it_is_and_as_pairs():
    completions = [{"response": "3", "overall_score": 1.0}, {"response": "2", "overall_score": 9.5}]
    made = batch("preferences", {"instruction": "1 + 1?", "completions": completions})
    assert made["preference"].tolist() == [1.0, 9.5] and texts(made)[1][0].startswith(ANSWERED[:-1])
    pair = {"prompt": "1 + 1?", "chosen": [asked("1 + 1?"), said("2")], "rejected": [asked("1 + 1?"), said("3")]}
    made = batch("preferences", pair | {"messages": pair["chosen"], "score_chosen": 9.5, "score_rejected": 1.0})
    assert made["preference"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("chosen", ["\n\nHuman: 1 + 1?\n\nAssistant: 2", [asked("1 + 1?"), said("2")]])
def test_the_better_response_of_a_pair_as_a_conversation(chosen):
    row = {"chosen": chosen, "rejected": "\n\nHuman: 1 + 1?\n\nAssistant: 3"}
    [[example]] = use(reader("conversations", keys={"messages": "chosen"}), row)
    assert TOKENIZER.decode(example.tokens).startswith(ANSWERED.removesuffix("\n"))


def test_steps_with_labels():
    made = batch("steps", {"prompt": "1 + 1 + 1?", "completions": ["1 + 1 = 2", "2 + 1 = 4"], "labels": [True, False]})
    assert made["label"][made["loss_mask"]].tolist() == [1.0, 0.0]


def test_our_own_names_and_those_of_the_source_come_first():
    row = {"prompt": "1 + 1?", "answer": "2", "question": "2 + 2?"}
    assert texts(batch("conversations", row)) == texts(batch("conversations", {"prompt": "1 + 1?", "answer": "2"}))
    named = reader("conversations", keys={"prompt": "other"})
    [[example]] = use(named, {"question": "2 + 2?", "other": "1 + 1?", "answer": "2"})
    assert example.row["prompt"] == "1 + 1?"


def test_the_page_has_every_convention():
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for names in CONVENTIONS:
        theirs = [column for columns in names.values() for column in columns]
        assert any(all(f"`{column}`" in row for column in [*theirs, *names]) for row in rows), names


def test_rows_of_mixed_forms_are_named():
    rows = [{"prompt": "1?", "answer": "2"}] * 2 + [{"input": "1?", "target": "2"}]
    with pytest.raises(ValueError, match=r"a\.jsonl:3: no key 'prompt'.* 2 rows of a\.jsonl have it.*data\.bad_rows"):
        batch("conversations", *rows)
    assert len(batch("conversations", *rows, bad_rows="drop")) == 2


def test_numbers_of_tables_of_texts():
    made = batch(
        "labelled", *({"prompt": "1?", "answer": "2", "label": label} for label in ("1", "false", "0", "True"))
    )
    assert made["preference"].tolist() == [1.0, 0.0, 0.0, 1.0]
    made = batch("preferences", {"prompt": "1?", "chosen": "2", "rejected": "3", "margin": "0.5"})
    assert made["margin"].tolist() == [0.5, 0.0]
