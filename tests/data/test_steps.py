"""Judged steps: where a process reward model looks, and what it should say there."""

import pytest
import torch

from tests.data.reading import TOKENIZER, batch, chatml, reader, texts, use, user
from tests.data.test_templates import words

ROW = {"prompt": "1+1+1?", "steps": ["1+1=2", "2+1=4"], "labels": [True, 0.25]}
PLAIN = {"chat_template": "none"}  # tokens are bytes


def test_steps():
    made = batch("steps", ROW, **PLAIN)
    text = "1+1+1?1+1=2\n2+1=4\n"
    assert texts(made)[0][0] == text + "<|im_end|>"
    # judged at the line breaks (places 11 and 17), so trained right after them
    assert made["loss_mask"].nonzero().flatten().tolist() == [12, 18]
    assert [text[t - 1] for t in (12, 18)] == ["\n", "\n"]
    assert made["label"].dtype == torch.float32 and made["candidates"].dtype == torch.int32
    assert {t: v for t, v in enumerate(made["label"].tolist()) if v} == {12: 1.0, 18: 0.25}
    plus, minus = TOKENIZER.encode("+"), TOKENIZER.encode("-")
    assert made["candidates"].tolist() == [plus + minus] * 19
    assert made["prompt_length"].tolist() == [6] and made["index"].tolist() == [0]
    assert set(made.sequence) == {"group", "index", "prompt_length", "rows"}


def test_the_chat_template_writes_the_prompt_and_a_step_may_end_with_the_separator():
    made = batch("steps", {**ROW, "steps": ["1+1=2\n", "2+1=4"]})
    whole = chatml(user("1+1+1?"), answering=True) + "1+1=2\n2+1=4\n<|im_end|>"
    assert texts(made)[0] == (whole, "2<|im_end|>")


def test_a_separator_of_several_tokens_is_judged_at_its_last():
    made = batch("steps", ROW, **PLAIN, step_separator=" ;;", step_tokens=["y", "n"])
    assert texts(made)[0] == ("1+1+1?1+1=2 ;;2+1=4 ;;<|im_end|>", "2<|im_end|>")
    assert made["candidates"][0].tolist() == TOKENIZER.encode("yn")


def test_a_long_prompt_is_cut_with_its_columns():
    made = batch("steps", ROW, **PLAIN, on_long="truncate_left", max_prompt_tokens=2)
    assert texts(made)[0][0].startswith("1?1+1=2\n")
    assert {t: v for t, v in enumerate(made["label"].tolist()) if v} == {8: 1.0, 14: 0.25}
    assert len(made["candidates"]) == made.tokens_total


def test_what_happened_is_counted():
    examples = reader("steps", **PLAIN, max_tokens=30)
    use(examples, ROW, {**ROW, "steps": []}, {**ROW, "steps": ["a", " \n"]}, {**ROW, "prompt": "long" * 20})
    assert examples.report() == "1 used, 2 empty, 1 over 1024 tokens of prompt or 30 in all, 2 steps"


def test_what_is_said_of_a_step_must_be_one_token():
    with pytest.raises(ValueError, match=r"data.step_tokens: 'yes' must be one token of the tokenizer, not 3"):
        use(reader("steps", step_tokens=["yes", "n"]), ROW)
    with pytest.raises(ValueError, match=r"data.step_tokens: '\+' must be one token"):  # an unknown word
        use(reader("steps", tokenizer=words(), **PLAIN), ROW)
    with pytest.raises(ValueError, match=r"data.step_tokens: \['y', 'y'\] are the same token"):
        use(reader("steps", step_tokens=["y", "y"]), ROW)
