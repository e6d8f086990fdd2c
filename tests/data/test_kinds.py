"""Every row that docs/data.md shows can be used, and the page knows every kind."""

import json
import re
from pathlib import Path

import pytest

from coalign.data import messages
from coalign.data.kinds import KINDS
from tests.data.reading import reader, use

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_the_page_are_read(kind):
    (block,) = re.findall(rf"```jsonl {kind}\n(.*?)```", PAGE, re.DOTALL)
    rows = [json.loads(line) for line in block.splitlines()]
    examples = reader(kind)
    assert len(use(examples, *rows)) == len(rows) > 0


def test_keys_of_a_source_as_on_the_page():
    row = {"question": "1+1?", "6b_finetuning": {"solution": "2", "is_correct": False}}
    keys = {"prompt": "question", "answer": "6b_finetuning.solution", "label": "6b_finetuning.is_correct"}
    ((example,),) = use(reader("labelled", keys=keys), row)
    assert example.columns["preference"] == 0.0 and example.row["answer"] == "2"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["auto", "none"])
def test_a_row_that_would_be_tokenised_for_minutes_counts_as_long(kind, template, monkeypatch):
    monkeypatch.setattr(messages, "MAX_CHARACTERS", 400)
    long, short = "long " * 100, "short"
    texts = {"prompt": "p", "rejected": "no", "label": True, "labels": [1]}
    rows = [texts | {"answer": t, "text": t, "chosen": t, "steps": [t]} for t in (long, short)]
    rows += [row | {"prompt": long} for row in rows]
    examples = reader(kind, chat_template=template)
    used = 2 if kind == "documents" else 1
    assert len(use(examples, *(rows if kind != "prompts" else rows[1:]))) == used
    assert examples.counts["long"] == {"documents": 2, "prompts": 2}.get(kind, 3)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: a text of [\d,]+ characters; at most 400 are tokenised"):
        use(reader(kind, chat_template=template, on_long="error"), rows[2])
