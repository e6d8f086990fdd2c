"""Lists of tokens: added tokens, and what stays as it was."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign_megatron.vocab import extend
from coalign_megatron.vocab.tokenizer import extend_tokenizer, load_tokenizer, read_tokens
from packages.megatron.tests.vocab import made

NEW = ["apples", " half a", "<|tool|>", "数学题", "<<"]


def written(path, tokens):
    path.write_text("\n".join(tokens))
    return path


def extended(directory, tmp_path, tokens, **options):
    tokenizer = load_tokenizer(directory)
    extension = extend_tokenizer(
        tokenizer, read_tokens(written(tmp_path / "tokens.txt", tokens)), **{"special": False} | options
    )
    return tokenizer, extension


@pytest.fixture(scope="module", params=["byte_level_model", "sentencepiece_model"])
def directory(request, tmp_path_factory):
    return getattr(made, request.param)(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def both(directory, tmp_path_factory):
    return load_tokenizer(directory), extended(directory, tmp_path_factory.mktemp("list"), NEW)[0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*made.WORDS, *made.SIGNS, *NEW, " ", "<|im_end|>"])).map("".join))
def test_texts_with_no_new_token_are_tokenised_as_before_and_others_use_it(both, text):
    old, new = (t(text)["input_ids"] for t in both)
    used = {both[1].convert_ids_to_tokens(i) for i in new} & set(NEW)
    if any(token in text for token in NEW):
        assert used
    else:
        assert new == old


def test_the_pieces_are_those_of_the_old_tokenizer(directory, tmp_path):
    old = load_tokenizer(directory)
    tokenizer, extension = extended(directory, tmp_path, NEW)
    assert extension.first == len(old) and extension.steps == []
    assert tokenizer.convert_tokens_to_ids(NEW) == list(range(len(old), len(old) + len(NEW)))
    for token, pieces in zip(NEW, extension.pieces, strict=True):
        assert old.decode(pieces).strip() == token.strip() and len(pieces) > 1
        assert pieces == old("." + token, add_special_tokens=False)["input_ids"][-len(pieces) :]
    assert tokenizer.decode(tokenizer(" a <|tool|>apples.")["input_ids"]).endswith(" a <|tool|>apples.")


def test_the_normaliser_does_not_see_a_listed_token(tmp_path):
    directory = made.byte_level_model(tmp_path / "model")
    description = json.loads((directory / "tokenizer.json").read_text())
    description["normalizer"] = {"type": "Lowercase"}
    (directory / "tokenizer.json").write_text(json.dumps(description))
    tokenizer, _ = extended(directory, tmp_path, ["TOTAL of"])
    old = load_tokenizer(directory)
    assert "TOTAL of" in tokenizer.tokenize("the TOTAL of it")
    assert tokenizer("the total of it")["input_ids"] == old("the total of it")["input_ids"]


def test_special_tokens_are_left_out_of_decoded_texts(directory, tmp_path):
    for special, shown in ((False, "a<|tool|>b"), (True, "ab")):
        tokenizer, _ = extended(directory, tmp_path, ["<|tool|>"], special=special)
        ids = tokenizer("a<|tool|>b", add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == shown


def test_tokens_that_do_not_enter_are_counted(directory, tmp_path):
    (there,) = {"▁the", " t"} & {"▁the" if "▁the" in load_tokenizer(directory).get_vocab() else " t"}
    _, extension = extended(directory, tmp_path, ["new one", "t", there, "", "new one"])
    assert len(extension.pieces) == 1
    assert extension.skipped["blank"] == [""] and extension.skipped["repeated"] == ["new one"]
    assert extension.skipped["already there"] == ["t", there]


def test_letters_that_a_byte_level_decoder_takes_for_bytes(tmp_path):
    tokenizer, extension = extended(made.byte_level_model(tmp_path / "model"), tmp_path, ["Ärger", "Ärger 中", "中"])
    assert extension.skipped["garbled by decoding"] == ["Ärger"]
    text = "viel Ärger 中 und Ärger, 中"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_nothing_new(directory, tmp_path):
    with pytest.raises(ValueError, match=r"tokens\.txt has no token that is new to the tokenizer .1 already there"):
        extended(directory, tmp_path, ["t"])


def test_special_is_for_lists(directory, tmp_path):
    made.byte_level(1, 400).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"--special is for a list of tokens; .*tokenizer\.json is a vocabulary"):
        extend_tokenizer(load_tokenizer(directory), read_tokens(tmp_path / "tokenizer.json"), special=True)


def test_a_tokenizer_with_gaps_in_its_ids(tmp_path):
    directory = made.byte_level_model(tmp_path / "model")
    description = json.loads((directory / "tokenizer.json").read_text())
    description["added_tokens"] = []
    description["model"]["vocab"]["far away"] = 335
    (directory / "tokenizer.json").write_text(json.dumps(description))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": settings["tokenizer_class"]}))
    with pytest.raises(ValueError, match="gaps below its last one, 335"):
        extended(directory, tmp_path, ["new one"])


@pytest.mark.parametrize("kind", ["list", "vocabulary"])
def test_the_rest_of_the_tokenizer_stays(directory, tmp_path, kind):
    source = tmp_path / ("tokens.txt" if kind == "list" else "tokenizer.json")
    if kind == "list":
        written(source, NEW)
    else:
        made.byte_level(1, 500).save(str(source))
    extend(directory, source, tmp_path / "out")
    old, new = load_tokenizer(directory), load_tokenizer(tmp_path / "out")
    assert type(new) is type(old)
    assert new.model_max_length == old.model_max_length == 777
    assert new.special_tokens_map == old.special_tokens_map
    assert new.chat_template == old.chat_template
    assert {t: new.get_vocab()[t] for t in old.get_vocab()} == old.get_vocab()
    assert sorted(new.get_vocab().values()) == list(range(len(new)))
    for text in ("", "t"):
        assert new(text)["input_ids"] == old(text)["input_ids"]


def test_a_tokenizer_written_in_python_is_refused(directory, monkeypatch):
    class Slow:
        is_fast = False

    monkeypatch.setattr("coalign_megatron.vocab.tokenizer.AutoTokenizer.from_pretrained", lambda path: Slow())
    with pytest.raises(ValueError, match=r"the tokenizer \(Slow\) is written in Python"):
        load_tokenizer(directory)
