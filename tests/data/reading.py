"""Rows read without files: what one kind of data makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.batch import Batch
from coalign.data.examples import Example, RowEncoder, build_batch
from coalign.data.kinds import KINDS
from coalign.data.loader import Loader, build_loader
from coalign.data.sources import SourceRow
from coalign.data.templates import load_template
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def reader(
    kind: str, *, tokenizer: Any = TOKENIZER, keys: dict[str, str] | None = None, keep: bool = False, **config: Any
) -> RowEncoder:
    """The rows of a source `a.jsonl`; ``config`` is that of `data`."""
    data = DataConfig(**config)
    source = SourceConfig(path="a.jsonl", keys=keys or {}, keep_special_tokens=keep)
    template = load_template(
        tokenizer, data.chat_template, data.chat_template_kwargs, data.reasoning, keep_special_tokens=keep
    )
    return KINDS[kind]("a.jsonl", data, source, template)


def use(examples: RowEncoder, *rows: dict[str, Any]) -> list[list[Example]]:
    """What can be used of the rows, counted; ValueError for a row that is refused."""
    entries = [SourceRow(i, lambda row=row: dict(row), lambda i=i: f"a.jsonl:{i + 1}") for i, row in enumerate(rows)]
    found = [examples.use(entry) for entry in entries]
    return [row for row in found if row is not None]


def batch(kind: str, *rows: dict[str, Any], **config: Any) -> Batch:
    """The rows that can be used, as one batch."""
    used = use(reader(kind, **config), *rows)
    return build_batch(used, range(len(used)))


def texts(made: Batch, tokenizer: Any = TOKENIZER) -> list[tuple[str, str]]:
    """Of each sequence: all of it, and what is trained."""
    return [(tokenizer.decode(r["tokens"]), tokenizer.decode(r["tokens"][r["loss_mask"]])) for r in made.rows()]


def assert_same(one: Batch, other: Batch) -> None:
    """Two batches have the same sequences and columns, bit for bit."""
    assert one.lengths.tolist() == other.lengths.tolist()
    assert set(one.token) == set(other.token) and set(one.sequence) == set(other.sequence)
    for name in [*one.token, *one.sequence]:
        a, b = one[name], other[name]
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b, name


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write rows as JSON lines; return the path as a configuration has it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path: Path, n: int, start: int = 0) -> str:
    """Write rows with their numbers under `n`; return the path."""
    return write(path, [{"prompt": f"p{i}", "answer": f"a{i}", "n": i} for i in range(start, start + n)])


def loader(
    *paths: str,
    weights: Sequence[float] | None = None,
    kind: str = "prompts",
    split: Literal["train", "eval"] = "train",
    batch_size: int = 4,
    seed: int = 0,
    max_samples: int | None = None,
    batch_tokens: int | None = None,
    allow_changed: bool = False,
    **config: Any,
) -> Loader:
    """The loader of files; ``config`` is that of `data`."""
    rows = zip(paths, weights or [1.0] * len(paths), strict=True)
    data = {split: [SourceConfig(path=path, weight=weight, max_samples=max_samples) for path, weight in rows]}
    how: dict[str, Any] = {"batch_tokens": batch_tokens, "allow_changed": allow_changed}
    config = DataConfig(**data, **config)
    return build_loader(config, TOKENIZER, kind=kind, split=split, batch_size=batch_size, seed=seed, **how)


def drawn(loader: Loader, batches: int) -> list[int]:
    """The numbers of the rows of so many batches."""
    return [row["n"] for _ in range(batches) for row in loader.next()["rows"]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chatml(*messages: dict[str, str], answering: bool = False) -> str:
    """The text of the tiny tokenizer's template."""
    said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return said + "<|im_start|>assistant\n" * answering
