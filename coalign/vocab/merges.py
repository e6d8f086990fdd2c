"""New pieces for a byte-pair encoding, without any change to texts that do not use them.

SentencePiece's rule, as in Chinese-LLaMA (arXiv:2304.08177): two neighbours may merge whenever their concatenation is
in the vocabulary. Every merge that makes a new piece gets a rank below all old merges. So the old merges come first,
all of them, as if nothing were new; a new merge then always makes a new piece, and no old merge takes a new piece. The
result is the old tokenisation in which some runs of neighbours have become one new token: a text without a new token in
it is tokenised as before. (Chinese-LLaMA ranks the new pieces above the old ones, which cuts old words anew.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from coalign.vocab.alphabet import Alphabet, alphabet_of


@dataclass(frozen=True)
class Merged:
    """tokenizer: with the new pieces. pieces: the old ids of each new piece, in the order of the new ids."""

    tokenizer: Tokenizer
    pieces: list[list[int]]
    present: list[str]
    unreachable: list[str]


def merge(old: Tokenizer, tokens: list[bytes], first: int) -> Merged:
    """Give ``old`` the tokens as pieces with the ids from ``first`` on.

    A token that no merge can reach is left out: its old pieces cannot be joined two by two, the pre-tokenizer would cut
    it, the normaliser would rewrite it, or it is part of a character. Raises ValueError for what is no BPE tokenizer.
    """
    description = json.loads(old.to_str())
    _require_plain_bpe(description["model"])
    alphabet = alphabet_of(description)
    spelled = {token: alphabet.spell(token) for token in tokens}
    known = old.get_vocab(with_added_tokens=True)
    present = [_show(t) for t, spelling in spelled.items() if spelling in known]
    wanted = {s: t for t, s in spelled.items() if s is not None and s not in known and _is_one_word(old, alphabet, s)}
    new = list(wanted)
    while True:
        extended = _extended(description, known, new, first)
        reached = [s for s in new if [t.value for t in extended.model.tokenize(s)] == [s]]
        if len(reached) == len(new):
            break
        new = reached  # the others may have been steps on the way to these
    pieces = [[t.id for t in old.model.tokenize(s)] for s in new]
    added, here = set(new), set(present)
    unreachable = [_show(t) for t, s in spelled.items() if s not in added and _show(t) not in here]
    return Merged(extended, pieces, present, unreachable)


def _require_plain_bpe(model: dict[str, Any]) -> None:
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        kind = model["type"] if model["type"] != "BPE" else "BPE that marks the parts of words"
        raise ValueError(
            f"the model's tokenizer is {kind}: a vocabulary can be merged into a byte-level or SentencePiece BPE only; "
            "give the tokens as a text file of one token a line"
        )


def _is_one_word(tokenizer: Tokenizer, alphabet: Alphabet, spelling: str) -> bool:
    """Whether normaliser and pre-tokenizer let the token through in one piece."""
    try:
        text = alphabet.read(spelling).decode()
    except UnicodeDecodeError:  # part of a character in a byte-level vocabulary: they work on characters
        return True
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, (0, len(text)))]
    return len(words) == 1 and words[0][0].endswith(spelling)


def _extended(description: dict[str, Any], known: dict[str, int], new: list[str], first: int) -> Tokenizer:
    """The old added tokens enter the vocabulary under their ids: otherwise they would be numbered anew behind it."""
    model = description["model"]
    building = model["vocab"].keys() | set(new)
    merges = [[s[:i], s[i:]] for s in new for i in range(1, len(s)) if s[:i] in building and s[i:] in building]
    vocabulary = known | {s: first + i for i, s in enumerate(new)}
    model = model | {"vocab": vocabulary, "merges": model["merges"] + merges}
    return Tokenizer.from_str(json.dumps(description | {"model": model}))


def _show(token: bytes) -> str:
    return token.decode(errors="backslashreplace")
