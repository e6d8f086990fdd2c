"""Batch: packed columns of N sequences of different lengths, end to end and without padding.

A Batch is immutable: its methods return new batches and keep the order of the sequences. It does not know what its
columns mean (coalign.types says that), and it never moves between devices by itself.

``partition`` and ``_pack_bins`` divide rows by their costs: pure functions on numbers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS, ImageSpan, Sample, Status

Column = Tensor | list[Any]
ListColumn = Literal["rows", "messages", "images"]  # Coalign's own columns that are lists of Python objects


@dataclass(frozen=True, eq=False)
class Batch:
    """N sequences as columns.

    ``lengths`` is i64[N], always on the CPU. ``token`` columns are [T, ...] with T = sum(lengths). ``sequence`` columns
    are [N, ...], or lists of N objects. ``batch["name"]`` returns a column of either kind. Two batches are equal only
    if they are the same object.

    Raises ValueError, naming the column, if its leading dimension does not fit.

    Example: two sequences of 3 and 2 tokens, and their second one alone.

        >>> batch = Batch(torch.tensor([3, 2]), {"tokens": torch.tensor([5, 6, 7, 8, 9])}, {"rows": [{}, {"id": 1}]})
        >>> batch.segment.tolist()
        [0, 0, 0, 1, 1]
        >>> batch = batch.with_(reward=torch.tensor([0.0, 1.0]))
        >>> second = batch.select([1])
        >>> second["tokens"].tolist(), second["reward"].tolist(), second["rows"]
        ([8, 9], [1.0], [{'id': 1}])
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
        tokens, sequences = self.tokens_total, len(self)
        for name, column in self.token.items():
            if (entries := _count(column)) != tokens:
                raise ValueError(f"token column '{name}' has {entries} entries; the batch has {tokens} tokens")
        for name, column in self.sequence.items():
            if (entries := _count(column)) != sequences:
                raise ValueError(f"sequence column '{name}' has {entries} entries; the batch has {sequences} sequences")
        if both := self.token.keys() & self.sequence.keys():
            raise ValueError(f"columns {sorted(both)} are declared both per token and per sequence")

    @staticmethod
    def _of_checked(lengths: Tensor, token: Mapping[str, Tensor], sequence: Mapping[str, Column]) -> Batch:
        """Make a batch of columns that fit by construction; a batch is cut and joined some thirty times in a step."""
        batch = object.__new__(Batch)
        object.__setattr__(batch, "lengths", lengths)
        object.__setattr__(batch, "token", MappingProxyType(token))
        object.__setattr__(batch, "sequence", MappingProxyType(sequence))
        return batch

    # A mappingproxy cannot be pickled, and cached properties need not travel. A view would be pickled with its whole
    # storage, so a slice would be as large as the batch.
    def __reduce__(self) -> tuple[Any, ...]:
        token = {k: _compact(v) for k, v in self.token.items()}
        return Batch, (_compact(self.lengths), token, {k: _compact(v) for k, v in self.sequence.items()})

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __contains__(self, name: str) -> bool:
        return name in self.token or name in self.sequence

    @overload
    def __getitem__(self, name: ListColumn) -> list[Any]: ...
    @overload
    def __getitem__(self, name: str) -> Tensor: ...
    def __getitem__(self, name: str) -> Column:
        """Return the column ``name``. KeyError lists the columns that exist."""
        if name in self.token:
            return self.token[name]
        if name in self.sequence:
            return self.sequence[name]
        if name in ("segment", "lengths"):
            return getattr(self, name)
        raise KeyError(f"the batch has no column '{name}'; it has {sorted([*self.token, *self.sequence])}")

    @overload
    def get(self, name: ListColumn) -> list[Any] | None: ...
    @overload
    def get(self, name: str) -> Tensor | None: ...
    def get(self, name: str) -> Column | None:
        return self.token.get(name, self.sequence.get(name))

    @cached_property
    def tokens_total(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def offsets(self) -> Tensor:
        """i64[N + 1]: sequence i has the tokens offsets[i]:offsets[i + 1]."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @cached_property
    def segment(self) -> Tensor:
        """i64[T]: the number of the sequence that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @cached_property
    def episode(self) -> Tensor | None:
        """i64[N]: the number of the episode that each row is of; None if every row is one (column ``branch``).

        ValueError if rows of an episode are no neighbours, or some are missing.
        """
        branch = self.get("branch")
        if branch is None or not bool(branch.any()):
            return None
        follows = branch != 0
        member = torch.stack([cast(Tensor, self[name]).long() for name in ("group", "index")])
        same = (member[:, 1:] == member[:, :-1]).all(0) & (branch[1:] == branch[:-1] + 1)
        if bool(follows[0]) or not bool(same[follows[1:]].all()):
            raise ValueError("rows of an episode (column `branch`) must be neighbours, in order, with the first one")
        return (~follows).cumsum(0) - 1

    def first_branches(self) -> Batch:
        """Return the first row of each episode, its main conversation."""
        return self if self.episode is None else self.select(cast(Tensor, self["branch"]) == 0)

    def as_episodes(self) -> Batch:
        """Return a batch with one sequence for each episode: its rows end to end, and the values of the first one.

        What counts samples counts these: an episode of many rows is one sample of its prompt.
        """
        if (episode := self.episode) is None:
            return self
        first = self.first_branches()
        lengths = torch.zeros(len(first), dtype=torch.int64).index_add_(0, episode, self.lengths)
        return Batch._of_checked(lengths, self.token, first.sequence)

    def spread(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """Give each row the values of its episode: ``columns`` are those of `as_episodes`, token columns stay."""
        if (episode := self.episode) is None:
            return dict(columns)
        merged = self.as_episodes()
        return {
            name: column
            if merged._is_token(name, column)
            else column[episode]
            if isinstance(column, Tensor)
            else [column[number] for number in episode.tolist()]
            for name, column in columns.items()
        }

    def with_(self, **columns: Column) -> Batch:
        """Return a batch with these columns added or replaced.

        coalign.types declares the kind of Coalign's own columns. ``reward/<name>`` and lists are per sequence. The kind
        of any other column follows from its leading dimension: the number of tokens or that of sequences. ValueError if
        it is neither, or if both numbers are equal and above 0.
        """
        token, sequence = dict(self.token), dict(self.sequence)
        for name, column in columns.items():
            token.pop(name, None)
            sequence.pop(name, None)
            if self._is_token(name, column):
                token[name] = cast(Tensor, column)
            else:
                sequence[name] = column
        return Batch(self.lengths, token, sequence)

    def _is_token(self, name: str, column: Column) -> bool:
        if name in TOKEN_COLUMNS:
            return True
        if name in SEQUENCE_COLUMNS or name.startswith("reward/") or isinstance(column, list):
            return False
        tokens, sequences = self.tokens_total, len(self)
        entries = _count(column)
        if entries not in (tokens, sequences):
            expected = f"expected {tokens} (per token) or {sequences} (per sequence)"
            raise ValueError(f"column '{name}' has {entries} entries; {expected}")
        if tokens == sequences > 0:
            raise ValueError(
                f"column '{name}': {tokens} tokens in as many sequences, so its shape does not tell its kind"
            )
        return entries == tokens

    def without(self, *names: str) -> Batch:
        """Return a batch without these columns; names that it does not have are ignored."""
        return self._pick({*self.token, *self.sequence} - set(names))

    def only(self, *names: str) -> Batch:
        """Return a batch with these columns alone. KeyError if one is missing."""
        for name in names:
            self[name]
        return self._pick(set(names))

    def _pick(self, names: set[str]) -> Batch:
        token = {k: v for k, v in self.token.items() if k in names}
        return Batch._of_checked(self.lengths, token, {k: v for k, v in self.sequence.items() if k in names})

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """Return the sequences ``rows``: indices from 0 in any order, or a bool mask [N].

        IndexError if one does not exist.
        """
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
            return self if len(rows) == len(self) else self.slice(first, last + 1)
        lengths = self.lengths[rows]
        # Token t of the result is the old one at: old start of its row, plus its distance from the row's new start.
        shifts = self.offsets[:-1][rows] - (lengths.cumsum(0) - lengths)
        indices = torch.repeat_interleave(shifts, lengths) + torch.arange(int(lengths.sum()))
        return Batch._of_checked(
            lengths,
            {k: v[indices] for k, v in self.token.items()},
            {k: v[rows] if isinstance(v, Tensor) else [v[i] for i in rows.tolist()] for k, v in self.sequence.items()},
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Return sequences start..stop-1 as views. IndexError outside 0 <= start <= stop <= N."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} do not lie in a batch of {len(self)} sequences")
        a, b = int(self.offsets[start]), int(self.offsets[stop])
        return Batch._of_checked(
            self.lengths[start:stop],
            {k: v[a:b] for k, v in self.token.items()},
            {k: v[start:stop] for k, v in self.sequence.items()},
        )

    def split(self, n: int, *, keep: str | None = None, by: str = "tokens") -> list[Batch]:
        """Split into n consecutive parts, balanced by ``tokens`` or ``sequences``.

        ``keep`` names a sequence column (such as ``group``): neighbours with equal values stay in one part. Parts are
        empty only if there are fewer such runs than n. KeyError if there is no such column.
        """
        ranges = split_ranges(self.lengths, n, keep=self[keep] if keep else None, by=by)
        return [self.slice(a, b) for a, b in ranges]

    def micro(
        self, max_tokens: int | None, *, keep: str | None = None, intact: bool = False, max_patches: int | None = None
    ) -> list[Batch]:
        """Pack the sequences into few micro-batches of at most ``max_tokens`` tokens each (None: a single one).

        With ``max_patches`` their images (column ``images``) have at most as many patches, each image counted once.

        Micro-batches with long sequences come first. ``keep`` names a column: neighbours with equal values stay
        together and in order as far as they fit, or always if ``intact``. ValueError if something that must not be
        cut exceeds ``max_tokens``: cutting it would change the result, and keeping it could exhaust the memory.
        """
        column = self[keep] if keep else None
        if max_patches is None:
            rows = pack_rows(self.lengths, max_tokens, keep=column, intact=intact)
        else:
            images = [{span.image: span.patches for span in spans} for spans in self["images"]]
            rows = _pack_rows_with_images(self.lengths, images, max_tokens, max_patches, keep=column, intact=intact)
        return [self.select(inside) for inside in rows]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Join batches, one after the other. ValueError if their columns differ."""
        batches = [b for b in batches if len(b)] or list(batches[:1])
        if not batches:
            return Batch(torch.zeros(0, dtype=torch.int64))
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        for batch in batches[1:]:
            if differ := (set(first.token) ^ set(batch.token)) | (set(first.sequence) ^ set(batch.sequence)):
                raise ValueError(f"cannot concatenate batches: only some of them have the columns {sorted(differ)}")
        return Batch._of_checked(
            torch.cat([b.lengths for b in batches]),
            {k: torch.cat([b.token[k] for b in batches]) for k in first.token},
            {k: _join([b.sequence[k] for b in batches]) for k in first.sequence},
        )

    @staticmethod
    def merge(batches: Sequence[Batch]) -> Batch:
        """Merge the columns of batches of the same sequences; a later column replaces an earlier one of the same name.

        ValueError if their lengths differ.
        """
        base = batches[0]
        token, sequence = dict(base.token), dict(base.sequence)
        for position, batch in enumerate(batches[1:], start=2):
            check_same_lengths(base.lengths, batch.lengths, position)
            token = {k: v for k, v in token.items() if k not in batch.sequence} | dict(batch.token)
            sequence = {k: v for k, v in sequence.items() if k not in batch.token} | dict(batch.sequence)
        return Batch._of_checked(base.lengths, token, sequence)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each sequence as a dict of its columns; token columns are views."""
        offsets = self.offsets.tolist()
        for i in range(len(self)):
            row = {k: v[offsets[i] : offsets[i + 1]] for k, v in self.token.items()}
            yield row | {k: v[i] for k, v in self.sequence.items()}

    def samples(self) -> list[Sample]:
        """Return the sequences as Samples. Their texts are empty, because a Batch has no tokenizer."""
        out = []
        for row in self.rows():
            mask = row["loss_mask"]
            runs: list[tuple[int, int]] = []
            if "versions" in row and bool(mask.any()):
                values, counts = torch.unique_consecutive(row["versions"][mask], return_counts=True)
                runs = list(zip(values.tolist(), counts.tolist(), strict=True))
            out.append(
                Sample(
                    group=int(row.get("group", 0)),
                    index=int(row.get("index", 0)),
                    tokens=row["tokens"],
                    loss_mask=mask,
                    logprobs=row.get("rollout_logprobs", torch.zeros(len(mask))),
                    versions=runs,
                    reward=float(row["reward"]) if "reward" in row else None,
                    rewards={k.removeprefix("reward/"): float(v) for k, v in row.items() if k.startswith("reward/")},
                    turn_rewards=row.get("turn_rewards"),
                    status=Status(int(row.get("status", 0))),
                    messages=row.get("messages") or [],
                    meta=row.get("rows") or {},
                    images=row.get("images") or (),
                    branch=int(row.get("branch", 0)),
                )
            )
        return out


def split_ranges(lengths: Tensor, n: int, *, keep: Column | None = None, by: str = "tokens") -> list[tuple[int, int]]:
    """Compute the n consecutive (start, stop) row ranges of `Batch.split`.

    It needs only the lengths, so a driver can cut a batch that other processes hold.
    """
    if n < 1:
        raise ValueError(f"cannot split a batch into {n} parts")
    if by not in ("tokens", "sequences"):
        raise ValueError(f"split by '{by}': expected 'tokens' or 'sequences'")
    sizes = lengths.tolist() if by == "tokens" else [1] * len(lengths)
    units = _units(sizes, keep)
    filled = [0, *accumulate(sum(sizes[a:b]) for a, b in units)]  # [u]: size of the first u units
    min_units = 1 if len(units) >= n else 0
    cuts = [0]
    for index in range(1, n):
        ideal = filled[-1] * index / n
        cut = bisect_left(filled, ideal)
        if cut and ideal - filled[cut - 1] < filled[cut] - ideal:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + min_units), len(units) - min_units * (n - index)))
    rows = [*(start for start, _ in units), len(sizes)]
    return [(rows[a], rows[b]) for a, b in pairwise([*cuts, len(units)])]


def pack_rows(
    lengths: Tensor, max_tokens: int | None, *, keep: Column | None = None, intact: bool = False
) -> list[list[int]]:
    """Compute the rows of each micro-batch of `Batch.micro`, from the lengths alone."""
    if len(lengths) == 0 or max_tokens is None:
        return [list(range(len(lengths)))] if len(lengths) else []
    if (longest := int(lengths.max())) > max_tokens:
        remedy = "raise it or shorten the data"
        raise ValueError(f"a sequence of {longest} tokens exceeds max_tokens_per_micro={max_tokens}; {remedy}")
    sizes = lengths.tolist()
    pieces = []
    for start, stop in _units(sizes, keep):
        size = sum(sizes[start:stop])
        if intact and size > max_tokens:
            raise ValueError(
                f"{stop - start} sequences that a loss compares have {size} tokens together, which exceeds "
                f"max_tokens_per_micro={max_tokens}; raise it or shorten the data"
            )
        pieces += [(start, stop)] if size <= max_tokens else _cut_to_fit(start, sizes[start:stop], max_tokens)
    bins = _pack_bins([sum(sizes[a:b]) for a, b in pieces], max_tokens)
    return [[row for piece in inside for row in range(*pieces[piece])] for inside in bins]


def _pack_rows_with_images(
    lengths: Tensor,
    images: Sequence[Mapping[str, int]],
    max_tokens: int | None,
    max_patches: int,
    *,
    keep: Column | None = None,
    intact: bool = False,
) -> list[list[int]]:
    """`pack_rows` with a second limit: the patches of the different images in a micro-batch.

    ``images`` has {image: patches} for each row. A unit costs the larger of its shares of both limits, so units that
    fit by their cost fit by both. Rows of a unit that must be cut count all of their images.
    """
    budget = max_tokens or max(1, int(lengths.sum()))
    if (largest := max((sum(patches.values()) for patches in images), default=0)) > max_patches:
        remedy = "raise it, or scale images down (data.images.max_pixels)"
        raise ValueError(
            f"images of a sequence have {largest} patches; max_patches_per_micro is {max_patches}; {remedy}"
        )
    sizes = lengths.tolist()
    costs = [
        max(size, -(-sum(patches.values()) * budget // max_patches))
        for size, patches in zip(sizes, images, strict=True)
    ]
    for start, stop in _units(sizes, keep):
        together: dict[str, int] = {}
        for patches in images[start:stop]:
            together |= patches
        tokens = sum(sizes[start:stop])
        cost = max(tokens, -(-sum(together.values()) * budget // max_patches))
        if cost <= budget or intact:  # the first row also carries the cost of the unit's images
            costs[start:stop] = [sizes[start] + cost - tokens, *sizes[start + 1 : stop]]
    return pack_rows(torch.tensor(costs), budget, keep=keep, intact=intact)


def _units(sizes: Sequence[int], keep: Column | None) -> list[tuple[int, int]]:
    """Return the row ranges that must not be cut: single rows, or runs of equal neighbours in ``keep``."""
    if keep is None:
        return [(i, i + 1) for i in range(len(sizes))]
    values = keep.tolist() if isinstance(keep, Tensor) else list(keep)
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return list(pairwise([*starts, len(values)]))


def _cut_to_fit(first: int, sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Row ranges from row ``first`` on, each as long as fits into ``capacity``."""
    cuts, filled = [first], 0
    for row, size in enumerate(sizes, first):
        if filled + size > capacity:
            cuts.append(row)
            filled = 0
        filled += size
    return list(pairwise([*cuts, first + len(sizes)]))


def _join(columns: Sequence[Column]) -> Column:
    if isinstance(columns[0], Tensor):
        return torch.cat(cast(list[Tensor], list(columns)))
    return [item for column in columns for item in column]


def check_same_lengths(first: Tensor, other: Tensor, position: int) -> None:
    """ValueError if the batch at this ``position`` (from 1) has other lengths i64[N] than the first one."""
    if not torch.equal(first, other):
        raise ValueError(
            f"batches of one apply must hold the same sequences: the first has {len(first)} with {int(first.sum())} "
            f"tokens, number {position} has {len(other)} with {int(other.sum())}"
        )


def _count(column: Column) -> int:
    """Count the entries of a column. (``len`` of a tensor asks first whether a tracer records.)"""
    return column.shape[0] if isinstance(column, Tensor) and column.dim() else len(column)


def _compact(column: Column) -> Column:
    """Copy a view, so that it no longer holds the storage of the whole column."""
    if isinstance(column, Tensor) and column.untyped_storage().nbytes() > column.nbytes:
        return column.clone()
    return column


# The length at which attention costs a token as much as everything else does: 12 times the hidden size, here 2048.
# (Per layer and token: 24 h² operations for the matrices, 2 h L for causal attention.)
ATTENTION_LENGTH = 24576

Subset = tuple[float, list[int]]  # minus the sum of some costs (so the largest sum sorts first), and their indices


def estimate_costs(lengths: Tensor) -> Tensor:
    """f64[N]: the cost of a forward pass over a sequence of each length, in tokens of a short sequence."""
    lengths = lengths.double()
    return lengths + lengths.square() / ATTENTION_LENGTH


def save_batches(state: Any, path: str | Path) -> None:
    """Write dictionaries and lists of batches, tensors, plain values and spans of images."""
    torch.save(_to_plain(state), path)


def load_batches(path: str | Path) -> Any:
    """Read what `save_batches` has written. A damaged file raises almost anything."""
    with torch.serialization.safe_globals([ImageSpan]):
        return _from_plain(torch.load(path, weights_only=True))


def _to_plain(value: Any) -> Any:
    if isinstance(value, Batch):
        return {"lengths": value.lengths, "token": dict(value.token), "sequence": dict(value.sequence)}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    return {key: _to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"lengths", "token", "sequence"}:
        return Batch(**value)
    return {key: _from_plain(item) for key, item in value.items()}


def partition(costs: Sequence[float], count: int) -> list[list[int]]:
    """Divide the indices of ``costs`` into ``count`` subsets of nearly equal sums.

    Indices ascend within a subset, and subsets are ordered by their first index. Empty subsets come last, and exist
    only if there are fewer indices than subsets.

    Largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning", 1982), for any
    number of subsets: join the two partial partitions with the greatest differences, the largest subset of one with
    the smallest of the other, until one partition is left.
    """
    if count == 1:
        return [list(range(len(costs)))]
    heap = [(-cost, index, [(-cost, [index])]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, index, second = heapq.heappop(heap)
        joined = _join_partitions(first, second, count)
        smallest = joined[-1][0] if len(joined) == count else 0.0
        heapq.heappush(heap, (joined[0][0] - smallest, index, joined))
    subsets = sorted(sorted(members) for _, members in heap[0][2]) if heap else []
    return subsets + [[] for _ in range(count - len(subsets))]


def _join_partitions(first: list[Subset], second: list[Subset], count: int) -> list[Subset]:
    """Join two partitions (largest subset first) into one of at most ``count`` subsets."""
    excess = max(len(first) + len(second) - count, 0)  # subsets to merge in pairs: the smallest ones of each side
    separate = first[: len(first) - excess] + second[: len(second) - excess]
    pairs = zip(first[len(first) - excess :], reversed(second[len(second) - excess :]), strict=True)
    return sorted(separate + [(a + b, x + y) for (a, x), (b, y) in pairs])


def _pack_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack the indices of ``sizes`` into few bins of ``capacity``; a larger item gets a bin of its own.

    Best fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): large items first.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free capacity, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        position = bisect_left(free, (sizes[index], 0))
        left, number = free.pop(position) if position < len(free) else (capacity, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        insort(free, (left - sizes[index], number))
    return bins
