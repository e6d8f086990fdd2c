"""Rows for new tokens in the embedding and head of a model, copied from one safetensors file to the next.

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

from coalign.files import list_weight_files, read_model_config

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class VocabularyRows:
    """The old and new rows of a vocabulary.

    first: the first new id; ids below are old tokens. pieces: the old ids of each new token. before, after: rows of the
    tables. There may be more rows than tokens, and in the old model fewer.
    """

    first: int
    pieces: list[list[int]]
    before: int
    after: int

    @classmethod
    def plan(cls, before: int, first: int, pieces: list[list[int]], multiple: int) -> VocabularyRows:
        """Use free rows first, and pad a table that must grow to a ``multiple``. Pieces without a row are dropped."""
        needed = first + len(pieces)
        after = before if needed <= before else -(-needed // multiple) * multiple
        return cls(first, [[i for i in ids if i < before] for ids in pieces], before, after)

    def extend(self, old: Tensor) -> Tensor:
        """Return the table [before, ...] as [after, ...] in the same dtype; means are computed in float32.

        Rows of old tokens and unused old rows are kept bit for bit. A new token without pieces, an old token without a
        row, and padding beyond ``before`` get the mean over all old tokens.
        """
        new = old.new_empty(self.after, *old.shape[1:])
        new[: self.before] = old
        average = old[: self.first].mean(0, dtype=torch.float32)
        new[self.before :] = average
        for i, ids in enumerate(self.pieces, start=self.first):
            new[i] = old[ids].mean(0, dtype=torch.float32) if ids else average
        return new


def read_config(directory: Path) -> PretrainedConfig:
    """Read config.json. Raises ValueError for a directory without a model whose vocabulary can be extended."""
    read_model_config(directory)
    config = AutoConfig.from_pretrained(directory)
    if config.get_text_config() is not config:
        raise ValueError(f"{directory}: {config.model_type} holds its language model inside another model")
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
    before, after = _shapes(config), _shapes(larger)
    return {name for name, shape in before.items() if shape != after[name]}


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
    found: set[str] = set()
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
            if len(tensors[name]) != rows.before:
                raise ValueError(
                    f"{shard}: {name} has {len(tensors[name])} rows; config.json says vocab_size {rows.before}"
                )
            grown -= tensors[name].nbytes
            tensors[name] = rows.extend(tensors[name])
            grown += tensors[name].nbytes
        save_file(tensors, target / shard.name, metadata)
        found |= here
    if not found:
        raise ValueError(f"{source}: the weights have none of {sorted(names)}")
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        index["metadata"]["total_size"] += grown
        write_json(target / INDEX, index)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
