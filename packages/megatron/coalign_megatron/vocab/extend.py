"""`coalign extend-vocab`: write a copy of a model directory with a larger vocabulary.

A new row is the mean of the rows of the token's old pieces. So its logit is the mean of theirs, and because exp is
convex, its probability is at most the mean of theirs. The old tokens keep their logits, and thus their proportions to
each other. The probability of all new tokens together grows with their number, until training separates them.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from coalign.files import list_weight_files, read_json_object, read_model_config, require_free_output, write_atomically
from coalign_megatron.vocab.tokenizer import (
    TokenizerExtension,
    check_saved_tokenizer,
    count_tokens,
    extend_tokenizer,
    load_tokenizer,
    read_tokens,
)

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class VocabularyRows:
    """The old and new rows of a vocabulary.

    first: the first new id; ids below are old tokens. pieces: the old ids of each new token. old_size, new_size: rows
    of the tables. There may be more rows than tokens, and in the old model fewer.
    """

    first: int
    pieces: list[list[int]]
    old_size: int
    new_size: int

    @classmethod
    def plan(cls, old_size: int, first: int, pieces: list[list[int]], multiple: int) -> VocabularyRows:
        """Use free rows first, and pad a table that must grow to a ``multiple``. Pieces without a row are dropped."""
        needed = first + len(pieces)
        new_size = old_size if needed <= old_size else -(-needed // multiple) * multiple
        return cls(first, [[i for i in ids if i < old_size] for ids in pieces], old_size, new_size)

    def extend(self, old: Tensor) -> Tensor:
        """Return the table [old_size, ...] as [new_size, ...] in the same dtype; means are computed in float32.

        Rows of old tokens and unused old rows are kept bit for bit. A new token without pieces, an old token without a
        row, and padding beyond ``old_size`` get the mean over all old tokens.
        """
        new = old.new_empty(self.new_size, *old.shape[1:])
        new[: self.old_size] = old
        average = old[: self.first].mean(0, dtype=torch.float32)
        new[self.old_size :] = average
        for i, ids in enumerate(self.pieces, start=self.first):
            new[i] = old[ids].mean(0, dtype=torch.float32) if ids else average
        return new


def read_config(directory: Path) -> PretrainedConfig:
    """Read config.json. Raises ValueError for a directory without a model whose vocabulary can be extended."""
    read_model_config(directory)
    config = AutoConfig.from_pretrained(directory)
    if config.get_text_config() is not config:
        raise ValueError(
            f"{directory}: {config.model_type} holds its language model inside another model, and extend-vocab takes a "
            "language model alone"
        )
    if not hasattr(transformers, (config.architectures or ["none"])[0]):
        raise ValueError(
            f"{directory}/config.json: architectures {config.architectures} is not a class of transformers"
        )
    if not list_weight_files(directory):
        raise ValueError(f"{directory} has no weights in safetensors files (model.safetensors or {INDEX})")
    return config


def find_token_tables(config: PretrainedConfig) -> set[str]:
    """Return the names of the weights with one row per token: those whose shape depends on ``vocab_size``."""
    larger = copy.deepcopy(config)
    larger.vocab_size += 1
    shapes, larger_shapes = _shapes(config), _shapes(larger)
    return {name for name, shape in shapes.items() if shape != larger_shapes[name]}


def _shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    assert config.architectures
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def write_weights(source: Path, target: Path, names: set[str], rows: VocabularyRows) -> None:
    """Copy the weights of ``source``, with new rows in those of ``names``.

    At most one file is in memory, and only if it holds such a table. Raises ValueError if no file does, or if a table
    has another number of rows than the config says.
    """
    grown = 0
    extended: set[str] = set()
    for shard in list_weight_files(source):
        with safe_open(shard, "pt") as file:
            inside = file.keys()
            here = names.intersection(inside)
            if not here:
                shutil.copyfile(shard, target / shard.name)
                continue
            tensors = {name: file.get_tensor(name) for name in inside}
            metadata = file.metadata()
        for name in here:
            if len(tensors[name]) != rows.old_size:
                raise ValueError(
                    f"{shard}: {name} has {len(tensors[name])} rows; config.json says vocab_size {rows.old_size}"
                )
            grown -= tensors[name].nbytes
            tensors[name] = rows.extend(tensors[name])
            grown += tensors[name].nbytes
        save_file(tensors, target / shard.name, metadata)
        extended |= here
    if not extended:
        raise ValueError(f"{source}: the weights have none of {sorted(names)}")
    if (source / INDEX).is_file():
        index = read_json_object(source / INDEX)
        index["metadata"]["total_size"] += grown
        write_json(target / INDEX, index)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


COPIED = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class ExtensionReport:
    """The result of an extension. ``sample``: tokens of the sample text before and after."""

    tokens: TokenizerExtension
    rows: VocabularyRows
    sample: tuple[int, int] | None

    def table(self) -> dict[str, float]:
        """Return the numbers that the command prints, by name."""
        rows, new, steps = self.rows, len(self.rows.pieces), len(self.tokens.steps)
        piece_counts = [len(ids) for ids in rows.pieces if ids]
        skipped = {f"skipped: {why}": len(what) for why, what in self.tokens.skipped.items() if what}
        numbers: dict[str, float] = {"tokens read": new - steps + sum(skipped.values()), "new tokens": new}
        if steps:
            numbers["of these, steps towards others"] = steps
        numbers |= skipped
        numbers["old pieces of a new token, mean"] = sum(piece_counts) / max(len(piece_counts), 1)
        if new > len(piece_counts):
            numbers["new tokens without old pieces (mean of all rows)"] = new - len(piece_counts)
        numbers |= {
            "tokens of the tokenizer before": rows.first,
            "tokens of the tokenizer after": rows.first + new,
            "rows of the model before": rows.old_size,
            "rows of the model after": rows.new_size,
            "spare rows used": max(0, min(new, rows.old_size - rows.first)),
            "rows without a token (padding)": rows.new_size - rows.first - new,
        }
        if rows.old_size < rows.first:
            numbers["old tokens that had no row (mean of all rows)"] = rows.first - rows.old_size
        if self.sample:
            old_count, new_count = self.sample
            numbers |= {"sample: tokens before": old_count, "sample: tokens after": new_count}
            numbers["sample: after / before"] = new_count / max(old_count, 1)
        return numbers


def extend(
    model: Path,
    tokens: Path,
    output: Path,
    *,
    special: bool = False,
    pad_to_multiple: int = 64,
    sample: Path | None = None,
) -> ExtensionReport:
    """Write a copy of ``model`` to ``output``, with the tokens of a file in its tokenizer, embedding and head.

    model: a Hugging Face directory in safetensors: a causal LM, or a model with another head (reward, value).
    tokens: a file that coalign_megatron.vocab.tokenizer can read. special: decoded texts omit the tokens of a list.
    pad_to_multiple: the number of rows becomes a multiple of this, if the table has to grow. sample: a text whose
    tokens are counted before and after.

    The output appears complete or not at all. Raises ValueError for input that cannot be used, FileExistsError for an
    output that is not empty, FileNotFoundError for a missing file.
    """
    require_free_output(output, [model, tokens, *([sample] if sample else [])], is_folder=True)
    if sample is not None and not sample.is_file():
        raise FileNotFoundError(f"--sample: {sample} is not a file")
    config, source = read_config(model), read_tokens(tokens)
    tokenizer = load_tokenizer(model)
    old_count = count_tokens(tokenizer, sample) if sample else 0
    extension = extend_tokenizer(tokenizer, source, special=special)
    rows = VocabularyRows.plan(config.vocab_size, extension.first, extension.pieces, pad_to_multiple)
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(output) as aside:
        aside.mkdir()
        tokenizer.save_pretrained(aside)
        check_saved_tokenizer(aside, tokenizer)
        _write_configs(model, aside, rows)
        write_weights(model, aside, find_token_tables(config), rows)
    return ExtensionReport(extension, rows, (old_count, count_tokens(tokenizer, sample)) if sample else None)


def _write_configs(source: Path, target: Path, rows: VocabularyRows) -> None:
    """Write config.json with the new size; the configuration of generation and legal texts stay as they are."""
    write_json(target / "config.json", read_model_config(source) | {"vocab_size": rows.new_size})
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copy(file, target)
