"""`coalign extend-vocab`: write a copy of a model directory with a larger vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from coalign.files import read_model_config, require_empty_output, write_atomically
from coalign.vocab.model import VocabularyRows, find_token_tables, read_config, write_json, write_weights
from coalign.vocab.sources import read_tokens
from coalign.vocab.tokenizer import (
    TokenizerExtension,
    check_saved_tokenizer,
    count_tokens,
    extend_tokenizer,
    load_tokenizer,
)

LEGAL = ("LICENSE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class ExtensionReport:
    """The result of an extension. ``sample``: tokens of the sample text before and after."""

    tokens: TokenizerExtension
    rows: VocabularyRows
    sample: tuple[int, int] | None

    def table(self) -> dict[str, float]:
        """Return the numbers that the command prints, by name."""
        rows, new, steps = self.rows, len(self.rows.pieces), len(self.tokens.steps)
        known = [len(ids) for ids in rows.pieces if ids]
        skipped = {f"skipped: {why}": len(what) for why, what in self.tokens.skipped.items() if what}
        numbers: dict[str, float] = {"tokens read": new - steps + sum(skipped.values()), "new tokens": new}
        if steps:
            numbers["of these, steps towards others"] = steps
        numbers |= skipped
        numbers["old pieces of a new token, mean"] = sum(known) / max(len(known), 1)
        if new > len(known):
            numbers["new tokens without old pieces (mean of all rows)"] = new - len(known)
        numbers |= {
            "tokens of the tokenizer before": rows.first,
            "tokens of the tokenizer after": rows.first + new,
            "rows of the model before": rows.before,
            "rows of the model after": rows.after,
            "spare rows used": max(0, min(new, rows.before - rows.first)),
            "rows without a token (padding)": rows.after - rows.first - new,
        }
        if rows.before < rows.first:
            numbers["old tokens that had no row (mean of all rows)"] = rows.first - rows.before
        if self.sample:
            before, after = self.sample
            numbers |= {"sample: tokens before": before, "sample: tokens after": after}
            numbers["sample: after / before"] = after / max(before, 1)
        return numbers


def extend(
    model: Path,
    tokens: Path,
    output: Path,
    *,
    special: bool = False,
    pad_to_multiple: int = 64,
    roles: Mapping[str, str] | None = None,
    sample: Path | None = None,
) -> ExtensionReport:
    """Write a copy of ``model`` to ``output``, with the tokens of a file in its tokenizer, embedding and head.

    model: a Hugging Face directory in safetensors: a causal LM, or a model with another head (reward, value).
    tokens: a file that coalign.vocab.sources can read. special: decoded texts omit the tokens of a list.
    pad_to_multiple: the number of rows becomes a multiple of this, if the table has to grow. roles: `eos` or `pad` ->
    the token for this role in tokenizer, config.json and generation_config.json. sample: a text whose tokens are
    counted before and after.

    The output appears complete or not at all. Raises ValueError for input that cannot be used, FileExistsError for an
    output that is not empty, FileNotFoundError for a missing file.
    """
    require_empty_output(output)
    if sample is not None and not sample.is_file():
        raise FileNotFoundError(f"--sample: {sample} is not a file")
    config, source = read_config(model), read_tokens(tokens)
    tokenizer = load_tokenizer(model)
    before = count_tokens(tokenizer, sample) if sample else 0
    extension = extend_tokenizer(tokenizer, source, special=special)
    rows = VocabularyRows.plan(config.vocab_size, extension.first, extension.pieces, pad_to_multiple)
    ids = _assign(tokenizer, roles or {})
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(output) as aside:
        aside.mkdir()
        tokenizer.save_pretrained(aside)
        check_saved_tokenizer(aside, tokenizer)
        _write_configs(model, aside, rows, ids)
        write_weights(model, aside, find_token_tables(config), rows)
    return ExtensionReport(extension, rows, (before, count_tokens(tokenizer, sample)) if sample else None)


def _assign(tokenizer: PreTrainedTokenizerFast, roles: Mapping[str, str]) -> dict[str, int]:
    """Give tokens their roles, which makes them special. Returns role -> id.

    A piece of a vocabulary is refused: as a special token it would be cut out of every word.
    """
    known = tokenizer.get_added_vocab()
    for role, token in roles.items():
        if token not in known:
            raise ValueError(f"--{role}: {token!r} is no added token, neither of the model's tokenizer nor a new one")
        tokenizer.add_special_tokens({f"{role}_token": token})
    return {role: known[token] for role, token in roles.items()}


def _write_configs(source: Path, target: Path, rows: VocabularyRows, roles: dict[str, int]) -> None:
    """Write the configurations with the new sizes and roles. Generation still stops at the old end tokens too."""
    config = read_model_config(source)
    ids: dict[str, int | list[int]] = {f"{role}_token_id": i for role, i in roles.items()}
    write_json(target / "config.json", config | {"vocab_size": rows.after} | ids)
    if (source / "generation_config.json").is_file():
        generation = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
        if "eos_token_id" in ids and (old := generation.get("eos_token_id")) is not None:
            ids["eos_token_id"] = list(dict.fromkeys([roles["eos"], *(old if isinstance(old, list) else [old])]))
        write_json(target / "generation_config.json", generation | ids)
    for pattern in LEGAL:
        for file in source.glob(pattern):
            shutil.copy(file, target)
