"""New tokens in a tokenizer: pieces of a vocabulary become merges, strings of a list become added tokens.

Both leave a text that contains none of them tokenised as before. A piece is found where the old pieces of a text join
to it; an added token wherever its characters stand, inside of words too, as a marker or a term should be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coalign.vocab.merges import alphabet_of, merge
from coalign.vocab.sources import TokenSource

VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class Extension:
    """What a tokenizer was given.

    first: the id of the first new token; the others follow it. pieces: for each new token, what the old tokenizer makes
    of it (empty where it knows nothing of it). steps: the last of them, which the source did not ask for, as
    coalign.vocab.merges explains. skipped: why -> tokens of the source that did not enter.
    """

    first: int
    pieces: list[list[int]]
    steps: list[str]
    skipped: dict[str, list[str]]


def load(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises ValueError for none, and for one that the tokenizers library cannot
    run."""
    # transformers makes an empty tokenizer of some classes where there is no vocabulary.
    if not any(file for pattern in VOCABULARIES for file in directory.glob(pattern)):
        raise ValueError(f"{directory} has no tokenizer (none of {', '.join(VOCABULARIES)})")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{directory}: the tokenizer ({type(tokenizer).__name__}) is written in Python; convert it to a "
            "tokenizer.json of the tokenizers library first"
        )
    return tokenizer


def extend_tokenizer(tokenizer: PreTrainedTokenizerBase, source: TokenSource, *, special: bool) -> Extension:
    """Add the tokens of ``source`` to ``tokenizer`` itself.

    special: left out of decoded texts, as an end-of-turn marker is; for a list only. Raises ValueError where nothing
    is new, or where the tokenizer cannot be extended this way.
    """
    if source.vocabulary and special:
        raise ValueError(f"--special is for a list of tokens; {source.path} is a vocabulary")
    first = max(tokenizer.get_vocab().values()) + 1
    tokens = _merge(tokenizer, source, first) if source.vocabulary else _add(tokenizer, source, first, special)
    if not tokens.pieces:
        why = ", ".join(f"{len(what)} {why}" for why, what in tokens.skipped.items() if what)
        raise ValueError(f"--tokens: {source.path} has no token that is new to the tokenizer ({why})")
    return tokens


def _merge(tokenizer: PreTrainedTokenizerBase, source: TokenSource, first: int) -> Extension:
    unknown = tokenizer.unk_token_id
    merged = merge(tokenizer.backend_tokenizer, source.tokens, first)
    tokenizer.backend_tokenizer.model = merged.tokenizer.model
    skipped = source.skipped | {"already there": merged.present, "out of reach": merged.unreachable}
    return Extension(first, _without(unknown, merged.pieces), merged.steps, skipped)


def _add(tokenizer: PreTrainedTokenizerBase, source: TokenSource, first: int, special: bool) -> Extension:
    """Not normalised: a text contains a token exactly if its characters stand in it, whatever the normaliser does."""
    backend, known = tokenizer.backend_tokenizer, tokenizer.get_vocab()
    alphabet = alphabet_of(json.loads(backend.to_str()))
    new, present, garbled = [], [], []
    for text in (token.decode() for token in source.tokens):
        if text in known or alphabet.spell(text.encode()) in known:
            present.append(text)
        else:
            (new if _survives(tokenizer, text) else garbled).append(text)
    # Not by the whole tokenizer: SentencePiece would put a space before each.
    pieces = [[piece.id for piece in backend.model.tokenize(alphabet.spell(t.encode()))] for t in new]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in new], special_tokens=special)
    if tokenizer.convert_tokens_to_ids(new) != list(range(first, first + len(new))):
        raise ValueError(
            f"{tokenizer.name_or_path}: the ids of the tokenizer have gaps below its last one, {first - 1}, which new "
            "tokens would fill: rows of the model that may have a meaning"
        )
    skipped = source.skipped | {"already there": present, "garbled by decoding": garbled}
    return Extension(first, _without(tokenizer.unk_token_id, pieces), [], skipped)


def _without(unknown: int | None, pieces: list[list[int]]) -> list[list[int]]:
    return [[i for i in ids if i != unknown] for ids in pieces]


def _survives(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """A byte-level decoder takes the Latin-1 letters of an added token for bytes."""
    decoder = tokenizer.backend_tokenizer.decoder
    return decoder is None or decoder.decode(["a", text]).endswith(text)


def verify(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the tokenizer written to ``directory`` comes back with other ids."""
    if load(directory).backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise ValueError(f"transformers rebuilds the tokenizer ({type(tokenizer).__name__}) other than it was")


def count(tokenizer: PreTrainedTokenizerBase, text: Path) -> int:
    """How many tokens a text file has, line by line."""
    with text.open(encoding="utf-8") as lines:
        return sum(len(tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"]) for line in lines)
