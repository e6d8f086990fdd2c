"""Small vocabularies and model directories, trained on the spot on invented texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.tiny import CHATML, SPECIAL, tiny_model_dir

LANGUAGE = """
the a of to and total number apples clips friends sold half many April altogether minutes hour earned per each
bought costs dollars twice left remaining weekly naïve café Müller 小明 苹果 中国 数学
"""
WORDS = LANGUAGE.split()
SIGNS = [".", ",", "?", "!", "=", "+", "-", "*", "/", "$", "<<", ">>", "####", "\n"]


@cache
def texts(seed: int, number: int = 200) -> tuple[str, ...]:
    """Sentences of real words; another ``seed`` prefers other words."""
    draw = random.Random(seed)
    preferred = draw.sample(WORDS, 12)

    def sentence() -> str:
        pieces = [draw.choice(preferred + WORDS + SIGNS + [str(draw.randrange(1000))]) for _ in range(12)]
        return "".join(piece if piece in SIGNS else " " + piece for piece in pieces).strip()

    return tuple(sentence() for _ in range(number))


def byte_level(seed: int, size: int, *, ignore_merges: bool = False):
    """A byte-level BPE of GPT-2's kind, trained on texts(seed), with SPECIAL behind its ``size`` pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts(seed), trainer)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return made


def sentencepiece(path: Path, sentences: Iterable[str], size: int, **options) -> Path:
    """A SentencePiece BPE with byte fallback; writes ``path``.model."""
    from sentencepiece import SentencePieceTrainer

    settings = {"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.98, "minloglevel": 2}
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_prefix=str(path), vocab_size=size, **settings | options
    )
    return path.with_suffix(".model")


def byte_level_model(path: Path, *, size: int = 330, vocab: int = 340, **options) -> Path:
    """A random llama with a byte-level tokenizer of ``size`` + 3 ids and a chat template."""
    from transformers import PreTrainedTokenizerFast

    tiny_model_dir(path, vocab=vocab, **{"family": "llama", **options})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(0, size), eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=777
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    return path


def sentencepiece_model(path: Path, *, size: int = 400, vocab: int = 420, **options) -> Path:
    """A random llama with the SentencePiece tokenizer that llamas have, as `tokenizer.model` only."""
    tiny_model_dir(path, vocab=vocab, **{"family": "llama", **options})
    for file in [*path.glob("tokenizer*"), path / "chat_template.jinja"]:
        file.unlink()
    sentencepiece(path / "tokenizer", texts(0), size).with_suffix(".vocab").unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "model_max_length": 777, "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
