"""Packed ragged columns: N sequences of different lengths, end to end, without a single padding token.

A Batch is immutable; its verbs return new ones and keep the order of the sequences. It does not know what its columns
mean (see coalign.types for that) and never moves between devices by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from coalign.data.balance import pack_bins
from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS, Sample, Status

Column = Tensor | list[Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """N sequences as columns.

    lengths i64[N], always on the CPU; ``token`` columns [sum(lengths), ...]; ``sequence`` columns [N, ...] or lists of
    N objects. ``batch["name"]`` finds a column of either kind; ``segment`` (i64[T], which sequence a token belongs to)
    is derived. Two batches are equal only if they are the same object.

    Raises ValueError where a column's leading dimension does not fit, naming the column.
    """

    lengths: Tensor
    token: Mapping[str, Tensor] = field(default_factory=dict)
    sequence: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", torch.as_tensor(self.lengths, dtype=torch.int64, device="cpu"))
        object.__setattr__(self, "token", MappingProxyType(dict(self.token)))
        object.__setattr__(self, "sequence", MappingProxyType(dict(self.sequence)))
        if self.lengths.dim() != 1 or bool((self.lengths < 0).any()):
            raise ValueError(f"lengths must be one non-negative number per sequence, not {self.lengths.tolist()}")
        tokens = self.tokens_total
        for name, column in self.token.items():
            if len(column) != tokens:
                raise ValueError(f"token column '{name}' has {len(column)} entries; the batch has {tokens} tokens")
        for name, column in self.sequence.items():
            if len(column) != len(self):
                raise ValueError(
                    f"sequence column '{name}' has {len(column)} entries; the batch has {len(self)} sequences"
                )
        if both := set(self.token) & set(self.sequence):
            raise ValueError(f"columns {sorted(both)} are declared both per token and per sequence")

    # A mappingproxy cannot be pickled, the cached properties need not travel, and a view would take its whole storage
    # along: a part of a split must weigh what it holds.
    def __reduce__(self) -> tuple[Any, ...]:
        token = {k: _own(v) for k, v in self.token.items()}
        return Batch, (_own(self.lengths), token, {k: _own(v) for k, v in self.sequence.items()})

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
        return self.token.get(name, self.sequence.get(name))

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

        A name declared in coalign.types has its kind from there; ``reward/<name>`` and lists are per sequence; any
        other is per token if its leading dimension is the number of tokens, per sequence if it is the number of
        sequences, and refused (ValueError) if it could be both (an empty batch takes it as per token).
        """
        token, sequence = dict(self.token), dict(self.sequence)
        for name, column in columns.items():
            token.pop(name, None)
            sequence.pop(name, None)
            (token if self._is_token(name, column) else sequence)[name] = column
        return Batch(self.lengths, token, sequence)

    def _is_token(self, name: str, column: Column) -> bool:
        if name in TOKEN_COLUMNS:
            return True
        if name in SEQUENCE_COLUMNS or name.startswith("reward/") or isinstance(column, list):
            return False
        tokens, sequences = self.tokens_total, len(self)
        if len(column) not in (tokens, sequences):
            expected = f"expected {tokens} (per token) or {sequences} (per sequence)"
            raise ValueError(f"column '{name}' has {len(column)} entries; {expected}")
        if tokens == sequences > 0:
            raise ValueError(
                f"column '{name}': {tokens} tokens in as many sequences, so its shape does not tell its kind"
            )
        return len(column) == tokens

    def without(self, *names: str) -> Batch:
        """A batch that lacks these columns (absent ones are ignored)."""
        return self._pick({*self.token, *self.sequence} - set(names))

    def only(self, *names: str) -> Batch:
        """A batch with these columns alone; KeyError if one is missing."""
        for name in names:
            self[name]
        return self._pick(set(names))

    def _pick(self, names: set[str]) -> Batch:
        token = {k: v for k, v in self.token.items() if k in names}
        return Batch(self.lengths, token, {k: v for k, v in self.sequence.items() if k in names})

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """The sequences ``rows``: indices from 0 in any order, or a bool mask [N]. IndexError if one does not exist."""
        rows = torch.as_tensor(rows, device="cpu")
        if rows.dtype == torch.bool:
            if rows.shape != self.lengths.shape:
                raise IndexError(f"a mask of {len(rows)} entries cannot select from {len(self)} sequences")
            rows = rows.nonzero().flatten()
        rows = rows.to(torch.int64)
        if rows.numel() == 0:
            return self.slice(0, 0)
        first, last = int(rows.min()), int(rows.max())
        if first < 0 or last >= len(self):
            raise IndexError(f"rows {first}..{last} do not lie in a batch of {len(self)} sequences")
        if torch.equal(rows, torch.arange(first, last + 1)):
            return self.slice(first, last + 1)
        lengths = self.lengths[rows]
        # Token t of the result comes from where its row started, plus its distance from where the row starts now.
        moved = self.offsets[:-1][rows] - (lengths.cumsum(0) - lengths)
        where = torch.repeat_interleave(moved, lengths) + torch.arange(int(lengths.sum()))
        return Batch(
            lengths,
            {k: v[where] for k, v in self.token.items()},
            {k: _take(v, rows) for k, v in self.sequence.items()},
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Sequences start..stop-1 as views, nothing copied. IndexError outside 0 <= start <= stop <= N."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} do not lie in a batch of {len(self)} sequences")
        a, b = int(self.offsets[start]), int(self.offsets[stop])
        return Batch(
            self.lengths[start:stop],
            {k: v[a:b] for k, v in self.token.items()},
            {k: v[start:stop] for k, v in self.sequence.items()},
        )

    def split(self, n: int, *, keep: str | None = None, by: str = "tokens") -> list[Batch]:
        """n consecutive parts whose concatenation is this batch, balanced by ``tokens`` or ``sequences``.

        ``keep`` names a sequence column whose equal neighbours stay together (``"group"``). Parts are empty only when
        there are fewer such runs than n. KeyError if there is no such column.
        """
        ranges = split_ranges(self.lengths, n, keep=self[keep] if keep else None, by=by)
        return [self.slice(a, b) for a, b in ranges]

    def micro(self, max_tokens: int | None, *, keep: str | None = None, whole: bool = False) -> list[Batch]:
        """Micro-batches of at most ``max_tokens`` tokens each (None: one), as few and as full as best fit finds.

        Every sequence is in one of them, long ones first. With ``keep``, equal neighbours of that column stay together
        and in order as long as they fit, or always if ``whole``. Raises ValueError for what may not be cut and is
        longer than the budget: cutting it would change the result, exceeding it break the promise on memory.
        """
        if len(self) == 0 or max_tokens is None:
            return [self] if len(self) else []
        if (longest := int(self.lengths.max())) > max_tokens:
            remedy = "raise it or shorten the data"
            raise ValueError(f"a sequence of {longest} tokens exceeds max_tokens_per_micro={max_tokens}; {remedy}")
        lengths = self.lengths.tolist()
        pieces = []
        for start, stop in _units(lengths, self[keep] if keep else None):
            size = sum(lengths[start:stop])
            if whole and size > max_tokens:
                raise ValueError(
                    f"{stop - start} sequences that a loss compares have {size} tokens together, which exceeds "
                    f"max_tokens_per_micro={max_tokens}; raise it or shorten the data"
                )
            pieces += [(start, stop)] if size <= max_tokens else _fitting(start, lengths[start:stop], max_tokens)
        bins = pack_bins([sum(lengths[a:b]) for a, b in pieces], max_tokens)
        return [self.select([row for piece in inside for row in range(*pieces[piece])]) for inside in bins]

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
            yield row | {k: v[i] for k, v in self.sequence.items()}

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
                    turn_rewards=row.get("turn_rewards"),
                    status=Status(int(row.get("status", 0))),
                    messages=row.get("messages") or [],
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
    filled = [0, *accumulate(sum(sizes[a:b]) for a, b in units)]  # by the first u units
    least = 1 if len(units) >= n else 0
    cuts = [0]
    for part in range(1, n):
        ideal = filled[-1] * part / n
        cut = bisect_left(filled, ideal)
        if cut and ideal - filled[cut - 1] < filled[cut] - ideal:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + least), len(units) - least * (n - part)))
    rows = [*(start for start, _ in units), len(sizes)]
    return [(rows[a], rows[b]) for a, b in pairwise([*cuts, len(units)])]


def _units(sizes: Sequence[int], keep: Column | None) -> list[tuple[int, int]]:
    """Row ranges that may not be cut: single rows, or runs of equal neighbours in ``keep``."""
    if keep is None:
        return [(i, i + 1) for i in range(len(sizes))]
    values = keep.tolist() if isinstance(keep, Tensor) else list(keep)
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return list(pairwise([*starts, len(values)]))


def _fitting(first: int, sizes: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Row ranges of at most ``room``, as long as they can be, from row ``first`` on."""
    cuts, filled = [first], 0
    for row, size in enumerate(sizes, first):
        if filled + size > room:
            cuts.append(row)
            filled = 0
        filled += size
    return list(pairwise([*cuts, first + len(sizes)]))


def _take(column: Column, rows: Tensor) -> Column:
    return column[rows] if isinstance(column, Tensor) else [column[i] for i in rows.tolist()]


def _join(columns: Sequence[Column]) -> Column:
    return torch.cat(list(columns)) if isinstance(columns[0], Tensor) else [x for c in columns for x in c]


def _own(column: Column) -> Column:
    """The column without the rest of the storage that it is a view of."""
    if isinstance(column, Tensor) and column.untyped_storage().nbytes() > column.nbytes:
        return column.clone()
    return column
