"""Reading new tokens from files."""

import builtins
import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from coalign_megatron.vocab.tokenizer import read_tokens
from packages.megatron.tests.vocab import made


def test_a_list_keeps_spaces_and_counts_the_rest(tmp_path):
    path = tmp_path / "tokens.txt"
    path.write_bytes("\ufeffalpha\r\n\n beta \n\t\nalpha\n中国".encode())
    source = read_tokens(path)
    assert [t.decode() for t in source.tokens] == ["alpha", " beta ", "中国"]
    assert source.skipped == {"blank": ["", "\t"], "repeated": ["alpha"]}
    assert not source.vocabulary


def test_a_sentencepiece_model(tmp_path):
    source = read_tokens(made.sentencepiece(tmp_path / "pieces", made.texts(1), 500, character_coverage=1.0))
    assert source.vocabulary
    assert b" the" in source.tokens and "苹".encode() in source.tokens
    assert len(source.skipped["control"]) == 3 + 256
    assert {"<unk>", "<s>", "</s>", "<0x0A>"} <= set(source.skipped["control"])


def test_a_byte_level_vocabulary(tmp_path):
    made.byte_level(1, 320).save(str(tmp_path / "tokenizer.json"))
    source = read_tokens(tmp_path / "tokenizer.json")
    assert source.vocabulary and len(source.tokens) == 320
    assert b" t" in source.tokens and b"\n" in source.tokens and b"\xe4" in source.tokens
    assert source.skipped["control"] == []  # the three special tokens are not in the vocabulary itself


def test_the_order_is_that_of_the_ids_and_special_tokens_stay_out(tmp_path):
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, "c": 3, "a": 2, "b": 1, "ba": 4}, merges=[("b", "a")]))
    tokenizer.add_tokens([AddedToken("c", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    edited = json.loads((tmp_path / "tokenizer.json").read_text())
    edited["model"] |= {"unk_token": "<unk>", "vocab": dict(reversed(edited["model"]["vocab"].items()))}
    (tmp_path / "tokenizer.json").write_text(json.dumps(edited))
    source = read_tokens(tmp_path / "tokenizer.json")
    assert source.tokens == [b"b", b"a", b"ba"]
    assert source.skipped["control"] == ["<unk>", "c"]


def test_byte_pieces_are_no_tokens(tmp_path):
    vocab = {"a": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True)).save(str(tmp_path / "tokenizer.json"))
    source = read_tokens(tmp_path / "tokenizer.json")
    assert source.tokens == [b"a"] and len(source.skipped["control"]) == 256


def test_a_unigram_vocabulary(tmp_path):
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("a", -2.0)], unk_id=0))
    unigram.save(str(tmp_path / "tokenizer.json"))
    edited = json.loads((tmp_path / "tokenizer.json").read_text())
    edited["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(edited))
    assert read_tokens(tmp_path / "tokenizer.json").tokens == [b" the", b"a"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokens.txt", b"\n \n", "holds no tokens .2 blank"),
        ("tokens.txt", b"", "holds no tokens .it is empty"),
        ("tokens.txt", b"\xff\xfe", "not UTF-8"),
        ("tokenizer.json", b"{}", r"not a tokenizer\.json"),
        ("tokenizer.json", b"[1]", r"not a tokenizer\.json"),
        ("tokenizer.json", b"{", r"not a tokenizer\.json"),
        ("tokenizer.json", b'{"model": {"type": "WordPiece", "vocab": {}}}', "WordPiece vocabulary; one of BPE"),
        ("x.model", b"nonsense", "not a SentencePiece model"),
        ("x.model", b"", "not a SentencePiece model"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tokens(tmp_path / name)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_tokens(tmp_path / "none.txt")


def test_sentencepiece_is_an_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *rest)

    (tmp_path / "x.model").write_bytes(b"x")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install coalign\[vocab\]"):
        read_tokens(tmp_path / "x.model")
