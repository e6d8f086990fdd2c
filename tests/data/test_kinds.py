"""Every row that docs/data.md shows can be used, and the page knows every kind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coalign.data import messages
from coalign.data.kinds import KINDS
from tests.data.reading import assistant, reader, use, user

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_the_page_are_read(kind):
    (block,) = re.findall(rf"```jsonl {kind}\n(.*?)```", PAGE, re.DOTALL)
    rows = [json.loads(line) for line in block.splitlines()]
    examples = reader(kind)
    assert len(use(examples, *rows)) == len(rows) > 0


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


GOOD = {"prompt": "1+1?", "answer": "2", "label": True}
ALPACA = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
SYSTEM, TALK = {"role": "system", "content": "Be brief."}, [user("1+1?"), assistant("2")]
PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "five"}
STEPS = {"prompt": "1+1+1?", "steps": ["1+1=2", "2+1=4"], "labels": [True, 0.25]}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "prompts": [
        ({"prompt": 3}, "'prompt' is int; expected a string or a list"),
        ({"prompt": ["a"]}, "'prompt': message 0 is not an object with role and content: a"),
        ({"prompt": [{"role": "user"}]}, "'prompt': message 0 is not an object with role and content"),
        ({"messages": {}}, "'messages' is dict"),
        ({"text": "1?", "n": 1}, r"no key 'prompt'; the row has n, text; .*'text'.*`keys: \{prompt: text\}`"),
    ],
    "conversations": [
        ({"prompt": "a", "answer": 3}, "'answer' is int; expected a string"),
        ({"prompt": "a"}, "no key 'answer'; the row has prompt"),
        ({"prompt": "1?", "target": "2"}, r"no key 'answer'; .* `keys: \{answer: target\}`"),
        (ALPACA | {"history": ["Hi", "Hello"]}, r"'history' is .*; expected a list of \[question, answer\]"),
        (ALPACA | {"history": [["Hi", 3]]}, "'history': message 1: content is int"),
        (ALPACA | {"system": ["S"]}, "'system' is list; expected the text"),
        ({"messages": [SYSTEM, *TALK], "system": "Other."}, "two system messages"),
        ({"prompt": [user("1?")], "answer": "2", "history": [["a", "b"]]}, "has 'history' and messages under 'prompt'"),
        ({"messages": TALK, "tools": 3}, "'tools' is no list of JSON Schema functions: 3"),
        ({"messages": TALK, "tools": ["add"]}, r"'tools' is no valid JSON: Expecting value \(column 1\)"),
        ({"messages": TALK, "tools": '["add"'}, "'tools' is no valid JSON"),
        ({"messages": TALK, "tools": {"name": "add"}}, "'tools' is no list of JSON Schema functions"),
        (
            {"messages": [user("a"), {"role": "assistant", "tool_calls": ["add"]}]},
            "message 1: a tool call is an object",
        ),
        (
            {"messages": [user("a"), {"role": "assistant", "content": 3}]},
            "message 1: content is int; expected a string",
        ),
        ({"messages": [user("a"), {"role": "assistant"}]}, "message 1 is not an object with role and content"),
    ],
    "documents": [
        ({"body": "a"}, "no key 'text'; the row has body"),
        ({"text": 3}, "'text' is int; expected"),
        ({"content": "1?"}, r"`keys: \{text: content\}`"),
    ],
    "preferences": [
        ({"prompt": "p", "chosen": "a"}, "no key 'rejected'; the row has chosen, prompt"),
        ({"prompt": "1?", "response_a": "2", "response_b": "3"}, r"`keys: \{chosen: response_a\}`"),
        ({"system": "s", "question": "1?", "chosen": "2", "rejected": "3"}, r"data\.prompt_key"),
        ({"chosen": "a", "rejected": "b"}, "the row has no prompt, and 'chosen' is a text that does not hold one"),
        ({**PAIR, "chosen": 3}, "'chosen' is int; expected a string or a list"),
        ({**PAIR, "chosen": [{"content": "a"}]}, "'chosen': message 0 is not an object with role and content"),
        ({**PAIR, "chosen": [user("p"), assistant("a")]}, "of chosen, rejected, some are whole conversations"),
        (
            {"chosen": [user("p"), assistant("a")], "rejected": [user("q"), assistant("a")]},
            "chosen, rejected begin with different messages",
        ),
        ({**PAIR, "prompt": [user("p"), assistant("a")]}, "'prompt' ends with the assistant's words"),
        ({**PAIR, "margin": "big"}, "'margin' is 'big'; expected"),
        ({**PAIR, "margin": -1}, "'margin' is -1; expected"),
        ({**PAIR, "margin": True}, "'margin' is True; expected"),
        ({"prompt": "p", "responses": ["a"]}, r"'responses' is \"\['a'\]\"; expected a list of two responses or more"),
        ({"prompt": "p", "responses": "ab"}, "'responses' is 'ab'; expected a list of two responses"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1]}, r"'scores' is \[1\]; expected 2 numbers"),
        (
            {"prompt": "p", "responses": ["a", "b"], "scores": [1, float("nan")]},
            r"'scores' is \[1, nan\]; expected 2 numbers",
        ),
        ({"prompt": "p", "responses": ["a", 7]}, r"'responses\[1\]' is int"),
    ],
    "steps": [
        ({**STEPS, "labels": [True]}, r"'labels' is \[True\]; expected 2 labels, one for each step"),
        ({**STEPS, "labels": [True, "no"]}, "'labels': label 1 is 'no'; expected true or false, or a probability"),
        ({**STEPS, "labels": [True, 1.5]}, r"'labels': label 1 is 1\.5"),
        ({**STEPS, "labels": [True, -1]}, "'labels': label 1 is -1"),
        ({**STEPS, "labels": [True, float("nan")]}, "'labels': label 1 is nan"),
        ({**STEPS, "steps": "1+1=2"}, "'steps' is '1.1=2'; expected a list of texts"),
        ({**STEPS, "steps": ["a", 2]}, "expected a list of texts"),
        ({"prompt": "p", "steps": ["a"]}, "no key 'labels'; the row has prompt, steps"),
    ],
    "labelled": [
        *(
            (GOOD | {"label": label}, "'label' is .*; expected true or false, or 1 or 0")
            for label in ("yes", "2", 2, 0.5, -1, [True])
        ),
        ({"prompt": "p", "answer": "a"}, "no key 'label'; the row has"),
        ({"prompt": "p", "label": True}, "no key 'answer'; the row has"),
        ({"prompt": "1?", "answer": "2", "is_correct": True}, r"`keys: \{label: is_correct\}`"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "row", "message"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_rows_of_another_shape_are_refused_with_their_line(kind, row, message):
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{message}"):
        use(reader(kind), row)
