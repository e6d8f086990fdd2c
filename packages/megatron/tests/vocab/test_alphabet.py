"""Spelling of tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from coalign_megatron.vocab.merges import SENTENCEPIECE, ByteLevelAlphabet, CharacterAlphabet, find_alphabet


def test_the_byte_alphabet_is_that_of_the_tokenizers_library():
    assert set(ByteLevelAlphabet()._letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    ((written, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" café\n中")
    assert ByteLevelAlphabet().spell(" café\n中".encode()) == written


@given(st.binary())
def test_byte_level_spells_any_bytes(token):
    assert ByteLevelAlphabet().read(ByteLevelAlphabet().spell(token)) == token


@given(st.text(min_size=1))
def test_byte_level_reads_what_the_library_decodes(spelling):
    assert ByteLevelAlphabet().read(spelling).decode(errors="replace") == decoders.ByteLevel().decode([spelling])


def test_characters_spell_whole_characters_only():
    assert SENTENCEPIECE.spell(b" foo bar") == "▁foo▁bar"
    assert SENTENCEPIECE.read("▁中国") == " 中国".encode()
    assert SENTENCEPIECE.spell("中".encode()[:2]) is None
    assert CharacterAlphabet(" ").spell(b" foo") == " foo"


DIGITS_AND_BYTES = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])


@pytest.mark.parametrize(
    ("parts", "spelled"),
    [
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(), "decoder": decoders.ByteLevel()}, "Ġfoo"),
        ({"pre_tokenizer": DIGITS_AND_BYTES, "decoder": decoders.ByteLevel()}, "Ġfoo"),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}, "▁foo"),
        ({"normalizer": normalizers.Replace(" ", "▁"), "decoder": decoders.Replace("▁", " ")}, "▁foo"),
        ({"pre_tokenizer": pre_tokenizers.Whitespace()}, " foo"),
    ],
)
def test_the_alphabet_shows_around_the_model(parts, spelled):
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    assert find_alphabet(json.loads(tokenizer.to_str())).spell(b" foo") == spelled
