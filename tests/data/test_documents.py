"""Documents: one BOS, one EOS, every token trained once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.reading import batch, reader, texts, use
from tests.data.test_templates import words
from tests.tiny import tiny_tokenizer


def test_a_document():
    made = batch("documents", {"text": "abc"}, {"text": "d"})
    assert texts(made) == [("abc<|im_end|>", "bc<|im_end|>"), ("d<|im_end|>", "<|im_end|>")]
    assert set(made.sequence) == {"group", "index", "prompt_length", "rows"}
    assert made["group"].tolist() == [0, 1] and made["prompt_length"].tolist() == [1, 1]


@pytest.mark.parametrize("text", ["1+1? 2", "<s>1+1? 2", "1+1? 2</s>", "<s><s>1+1? 2</s></s>"])
@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_one_bos_and_one_eos_whoever_adds_them(text, bos, eos):
    tokenizer = words(add_bos=bos, add_eos=eos)
    made = batch("documents", {"text": text}, tokenizer=tokenizer, chat_template="none", keep=True)
    tokens = made["tokens"].tolist()
    assert tokens.count(2) == 1 and tokens[-1] == 2
    assert tokens.count(1) == int(bos or text.startswith("<s>")) and tokens[0] == (1 if tokens.count(1) else tokens[0])
    inner = tokenizer.convert_tokens_to_ids(["1+1?", " ", "2"])
    assert tokens[-4:-1] == inner
    assert made["loss_mask"].tolist() == [False] + [True] * (len(tokens) - 1)


def test_one_token_for_both_ends():
    tokenizer = tiny_tokenizer(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    made = batch("documents", {"text": "ab"}, tokenizer=tokenizer)
    assert texts(made, tokenizer)[0][0] == "ab<|endoftext|>"


def test_a_long_document_is_cut_into_pieces():
    made = batch("documents", {"text": "abcdefgh"}, {"text": "xyz"}, max_tokens=4)
    first = [("abcd", "bcd"), ("defg", "efg"), ("gh<|im_end|>", "h<|im_end|>")]
    assert texts(made) == [*first, ("xyz<|im_end|>", "yz<|im_end|>")]
    assert made["group"].tolist() == [0, 0, 0, 1] and made["index"].tolist() == [0, 1, 2, 0]
    examples = reader("documents", max_tokens=4, on_long="error")
    use(examples, {"text": "abcdefgh"}, {"text": "xyz"})
    assert examples.report() == "2 used, 1 of these cut into pieces"


@given(st.text(st.characters(codec="ascii", exclude_characters="<"), min_size=1, max_size=40), st.integers(2, 12))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_token_but_the_first_is_trained_once(text, size):
    if not text.strip():
        return
    whole, cut = batch("documents", {"text": text}), batch("documents", {"text": text}, max_tokens=size)
    assert int(cut.lengths.max()) <= size
    assert cut["tokens"][cut["loss_mask"]].tolist() == whole["tokens"].tolist()[1:]


def test_rows_without_a_text():
    examples = reader("documents")
    use(examples, {"text": ""}, {"text": "\n "}, {"text": None}, {"text": "a"})
    assert examples.report() == "1 used, 3 empty"
    assert texts(batch("documents", {"body": "ab"}, text_key="body"))[0][0] == "ab<|im_end|>"
