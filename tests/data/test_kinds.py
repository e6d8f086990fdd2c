"""Every row that docs/data.md shows can be used, and the page knows every kind."""

import json
import re
from pathlib import Path

import pytest

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
