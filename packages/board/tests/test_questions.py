"""The question of a sample, which lists show."""

import pytest

from coalign_board.questions import find_question

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST, LAST = ({"role": "user", "content": text} for text in ("What is 1 + 1?", "And 2 + 2?\n"))
ANSWER = {"role": "assistant", "content": "Two."}


@pytest.mark.parametrize(
    ("sample", "question"),
    [
        ({"prompt": "<|system|>…", "row": {"messages": [SYSTEM, FIRST, ANSWER, LAST]}}, "And 2 + 2?"),
        ({"prompt": "…", "row": {"messages": [FIRST]}, "messages": [FIRST, ANSWER, LAST]}, "What is 1 + 1?"),
        ({"prompt": "…", "row": {}, "messages": [SYSTEM, FIRST, ANSWER]}, "What is 1 + 1?"),
        ({"prompt": "<s>1+1=", "row": {"prompt": "1+1="}}, "1+1="),
        ({"prompt": "1+1=", "row": {"messages": [SYSTEM]}}, "1+1="),
        ({"prompt": "1+1="}, "1+1="),
        ({"prompt": "1+1=", "row": None, "messages": None}, "1+1="),
        ({"prompt": "1+1=", "row": {"messages": ["what", {"role": "user"}, {"role": "user", "content": 3}]}}, "1+1="),
        ({}, ""),
        (
            {"row": {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}]}},
            "[image] Who?",
        ),
    ],
)
def test_the_question_is_the_last_turn_of_the_user(sample, question):
    assert find_question(sample) == question
