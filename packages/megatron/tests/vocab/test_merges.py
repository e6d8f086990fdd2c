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


TOTAL = ("t o a l to al", "t+o a+l")
BY_HAND = {  # a vocabulary, its merges, new tokens, what texts become; the steps on the way, and what is out of reach
    "two old pieces become one": (
        *TOTAL, ["toal"], {"toal": "toal", "toaltoal": "toal toal", "toatal": "to a t al"}, [], []
    ),
    "three old pieces need a step": (*TOTAL, ["total"], {"total": "total"}, ["tot"], []),
    "no step where the source has one": (*TOTAL, ["tal", "total"], {"total": "total"}, [], []),
    # `ab c`, never `a bc`: the old tokenizer joins a and b, whatever the new pieces would prefer.
    "old merges go first": ("a b c ab", "a+b", ["bc"], {"abc": "ab c", "bc": "bc"}, [], []),
    # bc is old, and made of b and c; `abc` comes as `ab c` and could be reached by a new way to `bc` only.
    "no new way to an old piece": (
        "a b c d ab bc cd abc bcd", "a+b b+c c+d a+bc b+cd", ["abcd"], {"abcd": "abcd", "abc": "ab c"}, [], []
    ),
    # a b c stands as three pieces, and both ab and bc are old pieces that nothing merges to.
    "out of reach": ("a b c ab bc", "", ["abc", "cb"], {"abccb": "a b c cb"}, [], ["abc"]),
    # `abc d` would be a way; `abc` cannot be made, `cd` and `bcd` can.
    "no way through what stays out": (
        "a b c d ab bc", "", ["abc", "abcd"], {"abcd": "abcd"}, ["cd", "bcd"], ["abc"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("vocab", "merges", "new", "texts", "steps", "missed"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(vocab, merges, new, texts, steps, missed):
    old, first = small(vocab, merges), len(vocab.split())
    merged = merge_tokens(old, [token.encode() for token in new], first)
    assert {text: " ".join(parts(merged.tokenizer, text)) for text in texts} == texts
    assert (merged.steps, merged.unreachable) == (steps, missed)
    entered = [token for token in new if token not in missed] + steps
    assert merged.pieces == [old.encode(token).ids for token in entered]
    assert [merged.tokenizer.token_to_id(token) for token in entered] == [*range(first, first + len(entered))]
    assert not any(merged.tokenizer.token_to_id(token) for token in missed)


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
