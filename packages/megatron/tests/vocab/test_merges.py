"""Pieces merged into a BPE: what must not change, and what must."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coalign_megatron.vocab.merges import merge_tokens
from coalign_megatron.vocab.tokenizer import read_tokens
from packages.megatron.tests.vocab import made
from tests.gsm8k import TRAIN, needs_gsm8k

OLD = made.byte_level(0, 330)
FIRST = 333


def small(vocab: str, merges: str) -> Tokenizer:
    """A BPE over characters: `small("t o to", "t+o")`."""
    ids = {token: i for i, token in enumerate(vocab.split())}
    return Tokenizer(models.BPE(vocab=ids, merges=[tuple(m.split("+")) for m in merges.split()]))


def parts(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def undone(ids: list[int], first: int, pieces: list[list[int]]) -> list[int]:
    """New tokens replaced by their old pieces."""
    return [old for i in ids for old in ([i] if i < first else pieces[i - first])]


def bytes_of(seed: int, size: int, path: Path) -> list[bytes]:
    made.byte_level(seed, size).save(str(path / "tokenizer.json"))
    return read_tokens(path / "tokenizer.json").tokens


# ---- by hand


def test_two_old_pieces_become_one():
    merged = merge_tokens(small("t o a l to al", "t+o a+l"), [b"toal"], 6)
    assert merged.pieces == [[4, 5]] and merged.steps == []
    assert parts(merged.tokenizer, "toal") == ["toal"]
    assert parts(merged.tokenizer, "toaltoal") == ["toal", "toal"]
    assert parts(merged.tokenizer, "toatal") == ["to", "a", "t", "al"]


def test_three_old_pieces_need_a_step():
    merged = merge_tokens(small("t o a l to al", "t+o a+l"), [b"total"], 6)
    assert merged.pieces == [[4, 0, 5], [4, 0]] and merged.steps == ["tot"]
    assert merged.tokenizer.token_to_id("total") == 6 and merged.tokenizer.token_to_id("tot") == 7
    assert parts(merged.tokenizer, "total") == ["total"]


def test_no_step_where_the_source_has_one():
    merged = merge_tokens(small("t o a l to al", "t+o a+l"), [b"tal", b"total"], 6)
    assert merged.steps == [] and parts(merged.tokenizer, "total") == ["total"]


def test_old_merges_go_first():
    # `ab c`, never `a bc`: the old tokenizer joins a and b, whatever the new pieces would prefer.
    merged = merge_tokens(small("a b c ab", "a+b"), [b"bc"], 4)
    assert parts(merged.tokenizer, "abc") == ["ab", "c"]
    assert parts(merged.tokenizer, "bc") == ["bc"]


def test_no_new_way_to_an_old_piece():
    # bc is old, and made of b and c; `abc` comes as `ab c` and could be reached by a new way to `bc` only.
    old = small("a b c d ab bc cd abc bcd", "a+b b+c c+d a+bc b+cd")
    assert parts(old, "abcd") == ["ab", "cd"]
    merged = merge_tokens(old, [b"abcd"], 9)
    assert parts(merged.tokenizer, "abcd") == ["abcd"]  # ab and cd are neighbours
    assert parts(merged.tokenizer, "abc") == parts(old, "abc") == ["ab", "c"]


def test_out_of_reach_is_told():
    # a b c stands as three pieces, and both ab and bc are old pieces that nothing merges to.
    old = small("a b c ab bc", "")
    merged = merge_tokens(old, [b"abc", b"cb"], 5)
    assert merged.unreachable == ["abc"] and merged.pieces == [[2, 1]]
    assert parts(merged.tokenizer, "abccb") == ["a", "b", "c", "cb"]


def test_a_way_through_a_token_that_stays_out_is_no_way():
    # `abc d` would be one; `abc` cannot be made (ab and bc are old pieces that nothing merges to), `cd` and `bcd` can.
    merged = merge_tokens(small("a b c d ab bc", ""), [b"abc", b"abcd"], 6)
    assert merged.unreachable == ["abc"] and merged.steps == ["cd", "bcd"]
    assert merged.tokenizer.token_to_id("abc") is None
    assert parts(merged.tokenizer, "abcd") == ["abcd"]


def test_a_character_that_was_only_bytes():
    vocab = {"a": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    old = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    merged = merge_tokens(old, ["中国".encode()], 257)
    assert merged.steps == ["中", "国"]
    assert merged.pieces[0] == [1 + b for b in "中国".encode()]
    assert parts(merged.tokenizer, "a中国") == ["a", "中国"]
    assert parts(merged.tokenizer, "人") == ["<0xE4>", "<0xBA>", "<0xBA>"]


def test_what_the_pre_tokenizer_cuts_stays_out():
    merged = merge_tokens(OLD, [b"apples.costs", b" apples", b"apples friends"], FIRST)
    assert merged.unreachable == ["apples.costs", "apples friends"]


def test_tokens_that_are_there():
    merged = merge_tokens(OLD, [b"t", b"<|im_end|>", b" apples"], FIRST)
    assert merged.present == ["t", "<|im_end|>"]


def test_added_tokens_keep_their_ids():
    merged = merge_tokens(OLD, [b" apples", b" zebra"], FIRST).tokenizer
    assert {t: merged.token_to_id(t) for t in made.SPECIAL} == {t: OLD.token_to_id(t) for t in made.SPECIAL}
    assert merged.encode("a<|im_end|>b").tokens == ["a", "<|im_end|>", "b"]
    assert merged.get_vocab_size() == max(merged.get_vocab().values()) + 1


def test_whole_words_without_merges():
    """Llama 3 takes a word that is in the vocabulary at once (ignore_merges)."""
    old = made.byte_level(0, 330, ignore_merges=True)
    merged = merge_tokens(old, [b" zebra"], FIRST)
    assert merged.tokenizer.encode("a zebra").tokens == ["a", "Ġzebra"] and len(merged.pieces[0]) > 2


OTHERS = {"wordpiece": models.WordPiece(vocab={"a": 0}, unk_token="a"), "unigram": models.Unigram([("a", 0.0)])}
OTHERS |= {"suffix": models.BPE(end_of_word_suffix="</w>")}


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_tokenizers_are_refused(model):
    with pytest.raises(ValueError, match="byte-level or SentencePiece BPE only; give the tokens as a text file"):
        merge_tokens(Tokenizer(model), [b"ab"], 1)


# ---- for any text


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    return merge_tokens(OLD, bytes_of(1, 600, tmp_path_factory.mktemp("source")), FIRST)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from([*made.WORDS, " ", "th", "pp", "<|im_end|>"])).map("".join)))
def test_any_text_is_the_old_tokens_with_some_neighbours_joined(merged, text):
    old, new = OLD.encode(text).ids, merged.tokenizer.encode(text).ids
    assert undone(new, FIRST, merged.pieces) == old
    assert merged.tokenizer.decode(new) == OLD.decode(old)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_vocabulary_keeps_texts_without_its_tokens(data):
    letters = st.text("abc", min_size=1, max_size=4)
    base = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
    vocab, merges = ["a", "b", "c"], []
    for i, j in base:
        pair = vocab[i % len(vocab)], vocab[j % len(vocab)]
        if "".join(pair) not in vocab:
            vocab.append("".join(pair))
            merges.append("+".join(pair))
    old = small(" ".join(vocab), " ".join(merges))
    made_of = merge_tokens(old, [t.encode() for t in data.draw(st.lists(letters, unique=True))], len(vocab))
    text = data.draw(st.text("abc", max_size=12))
    ids = made_of.tokenizer.encode(text).ids
    assert undone(ids, len(vocab), made_of.pieces) == old.encode(text).ids
    new = {t for t in made_of.tokenizer.get_vocab() if t not in vocab}
    if not any(t in text for t in new):
        assert ids == old.encode(text).ids
    for token in new - set(made_of.steps):
        assert made_of.tokenizer.encode(token).tokens == [token]


def test_the_new_tokens_are_used(merged):
    before = sum(len(OLD.encode(t).ids) for t in made.texts(1))
    after = sum(len(merged.tokenizer.encode(t).ids) for t in made.texts(1))
    assert after < 0.7 * before


def test_every_token_that_entered_is_reached(merged):
    asked = len(merged.pieces) - len(merged.steps)
    for i in range(FIRST, FIRST + asked):
        assert [t.id for t in merged.tokenizer.model.tokenize(merged.tokenizer.id_to_token(i))] == [i]


@needs_gsm8k
def test_gsm8k(merged):
    changed = 0
    with TRAIN.open() as lines:
        for line in [json.loads(line) for line in lines][:400]:
            text = line["question"] + "\n" + line["answer"]
            old, new = OLD.encode(text).ids, merged.tokenizer.encode(text).ids
            assert undone(new, FIRST, merged.pieces) == old
            assert merged.tokenizer.decode(new) == text
            changed += old != new
    assert changed


def test_sentencepiece_into_byte_level_and_back(tmp_path):
    pieces = read_tokens(made.sentencepiece(tmp_path / "pieces", made.texts(1), 500)).tokens
    assert b" total" in pieces
    joined = merge_tokens(OLD, pieces, FIRST)
    spelled = merge_tokens(_metaspace(), bytes_of(1, 400, tmp_path), 100)
    for text in made.texts(1)[:50]:
        assert joined.tokenizer.decode(joined.tokenizer.encode(text).ids) == text
        assert undone(joined.tokenizer.encode(text).ids, FIRST, joined.pieces) == OLD.encode(text).ids
    assert parts(spelled.tokenizer, "the") == ["▁the"]
    assert all("Ġ" not in token for token in spelled.tokenizer.get_vocab())


def _metaspace() -> Tokenizer:
    made_of = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "e": 2, "h": 3, "t": 4}, merges=[], unk_token=None))
    made_of.pre_tokenizer, made_of.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made_of
