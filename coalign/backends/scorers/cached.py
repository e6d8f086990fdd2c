"""A frozen model whose answers are kept on disk by content, and which is only loaded for what is not there yet.

Reference log-probs do not change during a run: computed once, they serve every epoch and every later run with the same
model and data, and the model's memory is free for the rest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from coalign.backends.base import HEADS, Module
from coalign.backends.layout import trained
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.cache import hash_file
from coalign.roles import Context
from coalign.types import Stats, Total

FILES = ("*.safetensors", "config.json", "adapter_config.json")
BUSY_SECONDS = 60.0  # replicas of one model write to the same file in turn


class CachedModule(Module):
    """A scorer of class ``config.module`` behind a store of its log-probs. `cache/hits`, `cache/misses`: sequences.

    A sequence is known by its tokens and its loss mask, a model by the bytes of its files and by what its config says
    about the computation. The store is an SQLite file in ``config.cache``.
    """

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError for a model whose answers change or are not log-probs."""
        if not config.frozen or config.head != "lm":
            raise ValueError(f"models.{name}.cache: only a frozen model with head `lm` can be cached")

    def __init__(self, config: ModelConfig, context: Context) -> None:
        """Raises what `check_settings` raises."""
        super().__init__(config, context)
        self.check_before_setup()
        self.module = resolve_class(config.module, "coalign.backends")
        self.scorer: Any = None
        self.store: sqlite3.Connection

    def setup(self) -> None:
        directory = Path(self.config.cache)
        directory.mkdir(parents=True, exist_ok=True)
        # Calls come one at a time, but not always from the thread that opened the file.
        self.store = sqlite3.connect(
            directory / f"{identity(self.config, self.context.seed)}.sqlite",
            timeout=BUSY_SECONDS,
            check_same_thread=False,
        )
        self.store.execute("CREATE TABLE IF NOT EXISTS logprobs (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def close(self) -> None:
        self.unload()
        self.store.close()

    @property
    def constant(self) -> Sequence[str]:
        return ("weights",)

    def tensors(self, part: str) -> Iterable[Tensor]:
        return () if self.scorer is None else self.scorer.tensors(part)

    def unload(self) -> None:
        """Give the model's memory back; it is loaded again if something new is asked."""
        if self.scorer is not None:
            self.scorer.close()
            self.scorer = None

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Tensor | Total]:
        """As TrainableModule.forward_step, with log-probs from the store where it has them."""
        mask = trained(batch)
        keys = _keys(batch, mask)
        found = self._read(keys)
        missing = [row for row, key in enumerate(keys) if key not in found]
        if missing:
            found |= self._compute(batch.select(missing), [keys[row] for row in missing])
        column = torch.zeros(batch.tokens_total)
        if keys:
            column[mask] = torch.cat([torch.frombuffer(bytearray(found[key]), dtype=torch.float32) for key in keys])
        counts: Stats = {"cache/hits": Total(len(keys) - len(missing)), "cache/misses": Total(len(missing))}
        return {into or HEADS["lm"][1]: column, **counts}

    def _compute(self, batch: Batch, keys: list[bytes]) -> dict[bytes, bytes]:
        if self.scorer is None:
            self.scorer = self.module(self.config, self.context)
            self.scorer.arena = self.arena
            self.scorer.setup()
        (column,) = self.scorer.forward_step(batch).values()
        mask = trained(batch)
        counts = torch.bincount(batch.segment[mask], minlength=len(batch)).tolist()
        values = [part.numpy().tobytes() for part in column[mask].split(counts)]
        with self.store:
            self.store.executemany("INSERT OR IGNORE INTO logprobs VALUES (?, ?)", zip(keys, values, strict=True))
        return dict(zip(keys, values, strict=True))

    def _read(self, keys: list[bytes]) -> dict[bytes, bytes]:
        found = {}
        for key in set(keys):
            row = self.store.execute("SELECT value FROM logprobs WHERE key = ?", (key,)).fetchone()
            if row is not None:
                found[key] = row[0]
        return found


def identity(config: ModelConfig, seed: int) -> str:
    """A hash of the files and settings that the log-probs follow from. ValueError for a model without files.

    ``seed``: what random weights are drawn from.
    """
    if config.load is None:
        raise ValueError("models.*.load is missing: a Hugging Face model directory")
    seen = xxh3_128()
    directories = [Path(config.load), *([Path(config.lora.load)] if config.lora and config.lora.load else [])]
    for directory in directories:
        for file in sorted(file for pattern in FILES for file in directory.glob(pattern)):
            seen.update(f"{file.name}\0{hash_file(file)}\0".encode())
    drawn = seed if config.init == "random" else None
    how = (config.module, drawn, config.dtype, config.compute_dtype, config.sampling.temperature)
    seen.update(repr(how).encode())
    return seen.hexdigest()


def _keys(batch: Batch, mask: Tensor) -> list[bytes]:
    tokens, marks = batch["tokens"].to(torch.int32).numpy(), mask.numpy()
    offsets = batch.offsets.tolist()
    return [
        blake2b(tokens[a:b].tobytes() + marks[a:b].tobytes(), digest_size=16).digest() for a, b in pairwise(offsets)
    ]
