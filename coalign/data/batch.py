"""Packed ragged columns: N sequences of different lengths, end to end, without a single padding token.

A Batch is immutable; its verbs return new ones and keep the order of the sequences. It does not know what its columns
mean (see coalign.types for that) and never moves between devices by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS, Sample, Status

Column = Tensor | list[Any]


@dataclass(frozen=True)
class Batch:
    """N sequences as columns.

    lengths i64[N]; ``token`` columns [sum(lengths), ...]; ``sequence`` columns [N, ...] or lists of N objects.
    ``batch["name"]`` finds a column of either kind; ``segment`` (i64[T], which sequence a token belongs to) is derived.

    Raises ValueError where a column's leading dimension does not fit, naming the column.
    """

    lengths: Tensor
    token: Mapping[str, Tensor] = field(default_factory=dict)
    sequence: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", torch.as_tensor(self.lengths, dtype=torch.int64))
        object.__setattr__(self, "token", MappingProxyType(dict(self.token)))
        object.__setattr__(self, "sequence", MappingProxyType(dict(self.sequence)))
        tokens = self.tokens_total
        for name, column in self.token.items():
            if len(column) != tokens:
                raise ValueError(f"token column '{name}' has {len(column)} entries; the batch has {tokens} tokens")
        for name, column in self.sequence.items():
            if len(column) != len(self):
                raise ValueError(f"sequence column '{name}' has {len(column)} entries; the batch has {len(self)} sequences")
        if both := set(self.token) & set(self.sequence):
            raise ValueError(f"columns {sorted(both)} are declared both per token and per sequence")

    # A mappingproxy cannot be pickled, and the cached properties need not travel.
    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self.lengths, dict(self.token), dict(self.sequence))

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in self.token or name in self.sequence

    def __getitem__(self, name: str) -> Column:
        """The column called ``name``; KeyError lists what there is."""
        if name in self.token:
            return self.token[name]
        if name in self.sequence:
            return self.sequence[name]
        if name in ("segment", "lengths"):
            return getattr(self, name)
        raise KeyError(f"the batch has no column '{name}'; it has {sorted([*self.token, *self.sequence])}")

    def get(self, name: str) -> Column | None:
        return self[name] if name in self else None

    @cached_property
    def tokens_total(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def offsets(self) -> Tensor:
        """i64[N + 1]: sequence i lies at offsets[i]:offsets[i + 1]."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @cached_property
    def segment(self) -> Tensor:
        """i64[T]: which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def with_(self, **columns: Column) -> Batch:
        """A batch with these columns added or replaced.

        A name declared in coalign.types has its kind from there; any other is per token if its leading dimension is
        the number of tokens, per sequence if it is the number of sequences, refused (ValueError) if it could be both.
        """
        token, sequence = dict(self.token), dict(self.sequence)
        for name, column in columns.items():
            token.pop(name, None)
            sequence.pop(name, None)
            (token if self._is_token(name, column) else sequence)[name] = column
        return Batch(self.lengths, token, sequence)

    def _is_token(self, name: str, column: Column) -> bool:
        if name in TOKEN_COLUMNS or name in SEQUENCE_COLUMNS or isinstance(column, list):
            return name in TOKEN_COLUMNS
        fits = (len(column) == self.tokens_total, len(column) == len(self))
        if fits == (True, True):
            raise ValueError(f"column '{name}': every sequence has one token, so its kind cannot be read from its shape")
        if not any(fits):
            raise ValueError(
                f"column '{name}' has {len(column)} entries; expected {self.tokens_total} (per token) or {len(self)} (per sequence)"
            )
        return fits[0]

    def without(self, *names: str) -> Batch:
        """A batch that lacks these columns (absent ones are ignored)."""
        keep = lambda columns: {k: v for k, v in columns.items() if k not in names}  # noqa: E731
        return Batch(self.lengths, keep(self.token), keep(self.sequence))

    def only(self, *names: str) -> Batch:
        """A batch with these columns alone; KeyError if one is missing."""
        for name in names:
            self[name]
        keep = lambda columns: {k: v for k, v in columns.items() if k in names}  # noqa: E731
        return Batch(self.lengths, keep(self.token), keep(self.sequence))

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """The sequences ``rows`` (indices, any order, or a bool mask [N])."""
        rows = torch.as_tensor(rows)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.to(torch.int64)
        if rows.numel() and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + rows.numel())):
            return self.slice(int(rows[0]), int(rows[0]) + rows.numel())
        offsets, lengths = self.offsets, self.lengths
        spans = [torch.arange(offsets[r], offsets[r + 1]) for r in rows.tolist()]
        where = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        return Batch(
            lengths[rows],
            {k: v[where] for k, v in self.token.items()},
            {k: _take(v, rows) for k, v in self.sequence.items()},
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Sequences start..stop-1 as views, nothing copied."""
        a, b = int(self.offsets[start]), int(self.offsets[stop])
        return Batch(
            self.lengths[start:stop],
            {k: v[a:b] for k, v in self.token.items()},
            {k: v[start:stop] for k, v in self.sequence.items()},
        )

    def split(self, n: int, *, keep: str | None = None, by: str = "tokens") -> list[Batch]:
        """n consecutive parts whose concatenation is this batch, balanced by ``tokens`` or ``sequences``.

        ``keep`` names a sequence column whose equal neighbours stay together (``"group"``). Parts may be empty when
        there are fewer units than n.
        """
        return [self.slice(a, b) for a, b in split_ranges(self.lengths, n, keep=self.get(keep) if keep else None, by=by)]

    def micro(self, max_tokens: int | None, *, keep: str | None = None) -> list[Batch]:
        """Consecutive micro-batches of at most ``max_tokens`` tokens each (None: one).

        With ``keep``, equal neighbours of that column stay together as long as they fit. Raises ValueError for a
        sequence longer than the budget: cutting it would change the result, exceeding it would break the promise on memory.
        """
        if len(self) == 0:
            return []
        if max_tokens is None:
            return [self]
        if (longest := int(self.lengths.max())) > max_tokens:
            raise ValueError(f"a sequence of {longest} tokens exceeds max_tokens_per_micro={max_tokens}; raise it or shorten the data")
        lengths = self.lengths.tolist()
        units = _units(lengths, self.get(keep) if keep else None)
        cuts, filled = [0], 0
        for start, stop in units:
            size = sum(lengths[start:stop])
            if filled and filled + size > max_tokens:
                cuts.append(start)
                filled = 0
            if size <= max_tokens:
                filled += size
                continue
            for row in range(start, stop):  # a unit over the budget is cut between its sequences
                if filled and filled + lengths[row] > max_tokens:
                    cuts.append(row)
                    filled = 0
                filled += lengths[row]
        return [self.slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(self)], strict=True)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """One batch after the other. Raises ValueError if they do not have the same columns."""
        batches = [b for b in batches if len(b)] or list(batches[:1])
        if not batches:
            return Batch(torch.zeros(0, dtype=torch.int64))
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        for other in batches[1:]:
            if differ := (set(first.token) ^ set(other.token)) | (set(first.sequence) ^ set(other.sequence)):
                raise ValueError(f"cannot concatenate batches with different columns: {sorted(differ)} in some only")
        return Batch(
            torch.cat([b.lengths for b in batches]),
            {k: torch.cat([b.token[k] for b in batches]) for k in first.token},
            {k: _join([b.sequence[k] for b in batches]) for k in first.sequence},
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each sequence as a dict of its columns (token columns as views)."""
        offsets = self.offsets.tolist()
        for i in range(len(self)):
            row = {k: v[offsets[i] : offsets[i + 1]] for k, v in self.token.items()}
            row |= {k: v[i] for k, v in self.sequence.items()}
            yield row

    @staticmethod
    def from_samples(samples: Sequence[Sample]) -> Batch:
        """Samples as a batch with the columns of coalign.types."""
        versions = []
        for s in samples:
            column = torch.full((len(s.tokens),), -1, dtype=torch.int32)
            coded = [v for v, n in s.versions for _ in range(n)]
            column[s.loss_mask] = torch.tensor(coded, dtype=torch.int32) if coded else -1
            versions.append(column)
        cat = lambda tensors, dtype: torch.cat(tensors).to(dtype) if tensors else torch.zeros(0, dtype=dtype)  # noqa: E731
        sequence: dict[str, Column] = {
            "group": torch.tensor([s.group for s in samples], dtype=torch.int64),
            "index": torch.tensor([s.index for s in samples], dtype=torch.int32),
            "status": torch.tensor([int(s.status) for s in samples], dtype=torch.uint8),
            "rows": [s.meta for s in samples],
        }
        if samples and all(s.reward is not None for s in samples):
            sequence["reward"] = torch.tensor([s.reward for s in samples], dtype=torch.float32)
        return Batch(
            torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64),
            {
                "tokens": cat([s.tokens for s in samples], torch.int32),
                "loss_mask": cat([s.loss_mask for s in samples], torch.bool),
                "rollout_logprobs": cat([s.logprobs for s in samples], torch.float32),
                "versions": cat(versions, torch.int32),
            },
            sequence,
        )

    def samples(self) -> list[Sample]:
        """The batch as Samples (texts are left empty: a Batch has no tokenizer)."""
        out = []
        for row in self.rows():
            mask = row["loss_mask"]
            coded: list[tuple[int, int]] = []
            if "versions" in row and bool(mask.any()):
                values, counts = torch.unique_consecutive(row["versions"][mask], return_counts=True)
                coded = list(zip(values.tolist(), counts.tolist(), strict=True))
            out.append(
                Sample(
                    group=int(row.get("group", 0)),
                    index=int(row.get("index", 0)),
                    tokens=row["tokens"],
                    loss_mask=mask,
                    logprobs=row.get("rollout_logprobs", torch.zeros(len(mask))),
                    versions=coded,
                    reward=float(row["reward"]) if "reward" in row else None,
                    rewards={k.removeprefix("reward/"): float(v) for k, v in row.items() if k.startswith("reward/")},
                    status=Status(int(row.get("status", 0))),
                    meta=row.get("rows") or {},
                )
            )
        return out


def split_ranges(lengths: Tensor, n: int, *, keep: Column | None = None, by: str = "tokens") -> list[tuple[int, int]]:
    """n consecutive (start, stop) row ranges that cover all rows, balanced by ``tokens`` or ``sequences``.

    Needs the lengths only, so a driver can cut a batch whose contents lie elsewhere. ``keep``: see Batch.split.
    """
    if n < 1:
        raise ValueError(f"cannot split a batch into {n} parts")
    if by not in ("tokens", "sequences"):
        raise ValueError(f"split by '{by}': expected 'tokens' or 'sequences'")
    sizes = lengths.tolist() if by == "tokens" else [1] * len(lengths)
    units = _units(sizes, keep)
    ends, total = [], 0
    for start, stop in units:
        total += sum(sizes[start:stop])
        ends.append(total)
    ranges, unit = [], 0
    for part in range(n):
        first = unit
        target = total * (part + 1) / n
        last = len(units) if part == n - 1 else unit
        if part < n - 1:
            # Take a unit while that brings the boundary nearer to its ideal place.
            while last < len(units) and abs(ends[last] - target) <= abs((ends[last - 1] if last else 0) - target):
                last += 1
        unit = last
        start = units[first][0] if first < len(units) else len(sizes)
        stop = units[last - 1][1] if last > first else start
        ranges.append((start, stop))
    return ranges


def _units(sizes: Sequence[int], keep: Column | None) -> list[tuple[int, int]]:
    """Row ranges that may not be cut: single rows, or runs of equal neighbours in ``keep``."""
    if keep is None:
        return [(i, i + 1) for i in range(len(sizes))]
    values = keep.tolist() if isinstance(keep, Tensor) else list(keep)
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return list(zip(starts, [*starts[1:], len(values)], strict=True))


def _take(column: Column, rows: Tensor) -> Column:
    return column[rows] if isinstance(column, Tensor) else [column[i] for i in rows.tolist()]


def _join(columns: Sequence[Column]) -> Column:
    return torch.cat(list(columns)) if isinstance(columns[0], Tensor) else [x for c in columns for x in c]
