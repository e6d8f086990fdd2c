"""Keeps the log-probs of a frozen model on disk, and loads the model only for sequences that are not there yet.

Reference log-probs do not change: computed once, they serve every epoch and every later run with the same model and
data, and the model's memory is free for other models.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from xxhash import xxh3_128

from coalign.backends.base import HEADS, Module
from coalign.backends.packing import get_loss_mask
from coalign.backends.pretrained import get_directory
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.files import hash_file
from coalign.hub import find_directory
from coalign.roles import Context
from coalign.types import Total

if TYPE_CHECKING:
    from coalign.backends.base import TrainableModule

FILES = ("*.safetensors", "config.json", "adapter_config.json")
BUSY_SECONDS = 60.0  # replicas of one model take turns at writing to the same file


class CachedModule(Module):
    """A scorer of class ``config.module`` behind an SQLite file of its log-probs in the directory ``config.cache``. The
    key of a sequence is its tokens and loss mask, that of a model its files' bytes and the settings that change
    log-probs. `cache/hits` and `cache/misses` count sequences."""

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError for a model that is trained or has another head than `lm`."""
        if not config.frozen or config.head != "lm":
            raise ValueError(f"models.{name}.cache: only a frozen model with head `lm` can be cached")
        if config.chat_template:
            raise ValueError(f"models.{name}.cache: not for a model that reads text with a tokenizer of its own")

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.check_before_setup()
        self.module = resolve_class(config.module, "coalign.backends")
        self.scorer: TrainableModule | None = None
        self.store: sqlite3.Connection

    def setup(self) -> None:
        directory = Path(str(self.config.cache))
        directory.mkdir(parents=True, exist_ok=True)
        # Calls come one at a time, but not always from the thread that opens the file.
        file = directory / f"{hash_model(self.config, self.context.seed)}.sqlite"
        self.store = sqlite3.connect(file, timeout=BUSY_SECONDS, check_same_thread=False)
        self.store.execute("CREATE TABLE IF NOT EXISTS logprobs (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def close(self) -> None:
        self.unload()
        self.store.close()

    @property
    def constant(self) -> Sequence[str]:
        return ("weights",)

    def tensors(self, component: str) -> Iterable[Tensor]:
        return () if self.scorer is None else self.scorer.tensors(component)

    def unload(self) -> None:
        """Release the model's memory; it is loaded again for a sequence that is not in the store."""
        if self.scorer is not None:
            self.scorer.close()
            self.scorer = None

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Tensor | Total]:
        """As TrainableModule.forward_step, with log-probs from the store where it has them."""
        mask = get_loss_mask(batch)
        tokens, marks = batch.token["tokens"].to(torch.int32).numpy(), mask.numpy()
        rows = [tokens[a:b].tobytes() + marks[a:b].tobytes() for a, b in pairwise(batch.offsets.tolist())]
        keys = [blake2b(row, digest_size=16).digest() for row in rows]
        stored = self._read(keys)
        missing = [row for row, key in enumerate(keys) if key not in stored]
        if missing:
            stored |= self._compute(batch.select(missing), [keys[row] for row in missing])
        column = torch.zeros(batch.tokens_total)
        if keys:
            column[mask] = torch.cat([torch.frombuffer(bytearray(stored[key]), dtype=torch.float32) for key in keys])
        counts = {"cache/hits": Total(len(keys) - len(missing)), "cache/misses": Total(len(missing))}
        return {into or HEADS["lm"][1]: column, **counts}

    def _compute(self, batch: Batch, keys: list[bytes]) -> dict[bytes, bytes]:
        if (scorer := self.scorer) is None:
            self.scorer = scorer = self.module(self.config, self.context)
            scorer.arena = self.arena
            scorer.setup()
        (column,) = scorer.forward_step(batch).values()
        mask = get_loss_mask(batch)
        counts = torch.bincount(batch.segment[mask], minlength=len(batch)).tolist()
        values = [logprobs.numpy().tobytes() for logprobs in column[mask].split(counts)]
        with self.store:
            self.store.executemany("INSERT OR IGNORE INTO logprobs VALUES (?, ?)", zip(keys, values, strict=True))
        return dict(zip(keys, values, strict=True))

    def _read(self, keys: list[bytes]) -> dict[bytes, bytes]:
        query = "SELECT value FROM logprobs WHERE key = ?"
        rows = {key: self.store.execute(query, (key,)).fetchone() for key in set(keys)}
        return {key: row[0] for key, row in rows.items() if row is not None}


def hash_model(config: ModelConfig, seed: int) -> str:
    """A hash of the files and settings that determine the log-probs. ``seed`` counts for random weights. Raises what
    `coalign.backends.pretrained.get_directory` raises."""
    seen = xxh3_128()
    adapters = config.lora.load if config.lora else None
    directories = [get_directory(config), *([find_directory(adapters)] if adapters else [])]
    for directory in directories:
        for file in sorted(file for pattern in FILES for file in directory.glob(pattern)):
            seen.update(f"{file.name}\0{hash_file(file, xxh3_128)}\0".encode())
    drawn = seed if config.init == "random" else None
    how = (config.module, drawn, config.dtype, config.compute_dtype, config.sampling.temperature)
    seen.update(repr(how).encode())
    return seen.hexdigest()
