"""Packs a micro-batch into one row of tokens, in which neighbours share one copy of the tokens that they begin with.

    batch     [p p p a a] [p p p b b b] [q q c]          three sequences, the first two of one group
    row       p p p a a b b b q q c                      position_ids 0 1 2 3 4 3 4 5 0 1 2

Pure index arithmetic, without models or losses. coalign.backends.attention reads the blocks, by a RowPlan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from coalign.data.batch import Batch
from coalign.devices import move_tensors
from coalign.types import ImageSpan

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring spans that one attention call takes: each span attends causally to itself, and to ``prefix``. The
    spans lie end to end from ``start``. ``prefix``: (start, stop) of the earlier one-span blocks that each of them
    continues, from its sequence's first token on. All that continues a block follows it directly."""

    start: int
    lengths: tuple[int, ...]
    prefix: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        return self.start + sum(self.lengths)

    @property
    def spans(self) -> Iterable[tuple[int, int]]:
        return pairwise(accumulate(self.lengths, initial=self.start))

    @property
    def prefix_length(self) -> int:
        return sum(stop - start for start, stop in self.prefix)

    @property
    def is_ragged(self) -> bool:
        """Whether its spans differ in length."""
        return len(set(self.lengths)) > 1

    @property
    def entries(self) -> int:
        """Tokens of its spans if all were as long as the longest."""
        return max(self.lengths) * len(self.lengths)


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of a row as attention over sequences of different lengths takes them: queries end to end, and keys.
    Span n has the queries ``queries[n]`` to ``queries[n + 1]``, and the keys ``keys[n]`` to ``keys[n + 1]`` of the
    row's tokens at ``source``: those of its prefix, then its own. The last query of a span sees its last key."""

    queries: Tensor  # i32[N + 1]
    keys: Tensor  # i32[N + 1]
    source: Tensor | None  # i64[K]; None: the tokens of the row in their order
    longest: tuple[int, int]  # most queries and most keys of a span


class RowPlan:
    """The indices and masks of a row's blocks on the device that computes it, made once for all layers.

    ``kernel``: how attention is computed (coalign.backends.attention.KERNELS). ``stacking[i]``: the indices i64[n ·
    longest] that stack the spans of block i, each padded with its last token, and those i64[tokens] that undo it;
    (None, None) for spans of one length. ``index``: `_index_stacking` of the blocks, if it is there already.
    ``two_way``: (start, stop) of positions in the row that see each other in both directions; a block that has any
    holds one span.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        device: torch.device | str,
        kernel: str = "auto",
        index: Tensor | None = None,
        two_way: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.blocks, self.device, self.kernel, self.two_way = blocks, torch.device(device), kernel, tuple(two_way)
        self.sizes = [sum(block.lengths) for block in blocks]
        left = (_index_stacking(blocks) if index is None else index).to(self.device)
        self.stacking: list[tuple[Tensor, Tensor] | tuple[None, None]] = []
        for block, tokens in zip(blocks, self.sizes, strict=True):
            if not block.is_ragged:
                self.stacking.append((None, None))
                continue
            into, back, left = left.tensor_split([block.entries, block.entries + tokens])
            self.stacking.append((into, back))
        self._kept: dict[Any, Any] = {}

    def keep(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return what ``make`` has made for ``key``, the same for all layers."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def mask(self, i: int, window: int | None) -> Tensor | None:
        """bool[longest, prefix + longest] of block ``i``, True where a query may look; None for plain causal attention.
        A token sees the ``window`` tokens up to itself."""
        return self.keep(("mask", i, window), lambda: _mask(self.blocks[i], window, self.device, self.two_way))

    @cached_property
    def two_way_groups(self) -> Tensor:
        """i32[P]: the number of the two-way group of each position of the row; -1: none."""
        groups = torch.full((sum(self.sizes),), -1, dtype=torch.int32)
        for number, (start, stop) in enumerate(self.two_way):
            groups[start:stop] = number
        return groups.to(self.device)

    @cached_property
    def spans(self) -> Spans:
        queries, keys, source = [0], [0], []
        for block in self.blocks:
            for start, stop in block.spans:
                queries.append(stop)
                keys.append(keys[-1] + block.prefix_length + stop - start)
                source += [torch.arange(*span) for span in (*block.prefix, (start, stop))]
        ends = torch.tensor([queries, keys], dtype=torch.int32)
        longest = ends.diff(dim=1).amax(1).tolist()
        moved = ends.to(self.device)
        shared = keys[-1] > queries[-1]
        return Spans(moved[0], moved[1], torch.cat(source).to(self.device) if shared else None, tuple(longest))

    @cached_property
    def positions(self) -> Tensor:
        """i32[P]: the index of each token of the row within its sequence."""
        firsts = [(block.prefix_length, length) for block in self.blocks for length in block.lengths]
        ranges = [torch.arange(first, first + length, dtype=torch.int32) for first, length in firsts]
        return torch.cat(ranges).to(self.device)

    @cached_property
    def reach(self) -> Tensor:
        """i32[P]: the position in the row behind the last token that may see each token."""
        ends: dict[int, int] = {}  # start of a span -> where it ends, or the last one that continues it
        for block in self.blocks:
            ends |= dict.fromkeys((start for start, _ in block.prefix), block.stop)
            ends |= dict(block.spans)
        lengths = torch.tensor([length for block in self.blocks for length in block.lengths])
        return torch.tensor(list(ends.values()), dtype=torch.int32).repeat_interleave(lengths).to(self.device)


def _index_stacking(blocks: Iterable[Block]) -> Tensor:
    """i64: for each block of spans of several lengths, the indices of tokens that stack its spans, then the indices in
    the stack of its tokens; one block after the other."""
    indices = [torch.empty(0, dtype=torch.int64)]
    for block in blocks:
        if block.is_ragged:
            lengths = torch.tensor(block.lengths)
            starts, column = lengths.cumsum(0) - lengths, torch.arange(max(block.lengths))
            indices.append((starts[:, None] + column.clamp(max=lengths[:, None] - 1)).flatten())
            indices.append((column < lengths[:, None]).flatten().nonzero().flatten())
    return torch.cat(indices)


def _mask(block: Block, window: int | None, device: torch.device, two_way: Sequence[tuple[int, int]]) -> Tensor | None:
    prefix, longest = block.prefix_length, max(block.lengths)
    inside = [(a, b) for a, b in two_way if block.start <= a and b <= block.stop]
    if not prefix and not inside and (window is None or window >= longest):
        return None
    query = torch.arange(prefix, prefix + longest, device=device)[:, None]
    key = torch.arange(prefix + longest, device=device)
    mask = key <= query
    for start, stop in inside:
        span = slice(start - block.start, stop - block.start)
        mask[span, span.start + prefix : span.stop + prefix] = True
    return mask if window is None or window >= prefix + longest else mask & (key > query - window)


@dataclass(frozen=True)
class Layout:
    """One packed row of P tokens that holds N sequences with T trained tokens. ``blocks`` cover the row in order, every
    token once. Trained tokens are in the order of the batch; the hidden state at position ``predictors[t]`` of the row
    predicts trained token t."""

    tokens: Tensor  # i64[P]
    positions: Tensor  # i64[P], the token's index within its sequence
    blocks: tuple[Block, ...]
    predictors: Tensor  # i64[T]
    targets: Tensor  # i64[T], the trained tokens
    segment: Tensor  # i64[T], the sequence of each trained token
    last: Tensor  # i64[N], the position in the row of each sequence's last token
    candidates: Tensor | None = None  # i64[T, K], the batch's column at the trained tokens
    copies: Tensor | None = None  # i64[P], how many sequences share the token; 0: padding
    experts: Tensor | None = None  # i16[P, L, k], the batch's column `routed_experts` at the tokens of the row
    stacking: Tensor | None = None  # i64, `_index_stacking` of the blocks
    kernel: str = "auto"  # how attention over the row is computed (coalign.backends.attention.KERNELS)
    images: tuple[ImageSpan, ...] = ()  # where images stand in the whole row; those of a shared prompt once
    offset: int = 0  # the position in the row of the first of ``tokens``, where these are one rank's chunk of it
    axes: Tensor | None = None  # i64[3, P], positions of rotary embeddings, where they are not `positions`
    two_way: tuple[tuple[int, int], ...] = ()  # (start, stop) in the row of tokens that see each other

    def to(self, device: torch.device | str) -> Layout:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **move_tensors({n: v for n, v in values.items() if isinstance(v, Tensor)}, device))

    @cached_property
    def plan(self) -> RowPlan:
        """The indices and masks of the blocks for attention, on the device of the tokens."""
        return RowPlan(self.blocks, self.tokens.device, self.kernel, self.stacking, self.two_way)


def get_loss_mask(batch: Batch) -> Tensor:
    """bool[sum T]: the batch's loss mask; without one, every token but the first of each sequence. Raises ValueError
    for an empty sequence, and for a mask with the first token of a sequence: nothing predicts it."""
    if len(batch) and int(batch.lengths.min()) == 0:
        raise ValueError(f"sequence {int(batch.lengths.argmin())} of the batch has no tokens")
    first = batch.offsets[:-1]
    mask = batch.token.get("loss_mask")
    if mask is None:
        mask = torch.ones(batch.tokens_total, dtype=torch.bool)
        mask[first] = False
    elif bool(mask[first].any()):
        row = int(mask[first].nonzero()[0])
        raise ValueError(f"loss_mask trains the first token of sequence {row}, which no token predicts")
    return mask


def pack(
    batch: Batch, *, share_prefix: bool = True, axes: Tensor | None = None, two_way_images: bool = False
) -> Layout:
    """Pack ``batch`` into one row.

    ``axes`` i64[3, sum T]: rotary positions of its tokens. ``two_way_images``: the tokens of an image see each other.

    With ``share_prefix``, neighbouring sequences of one ``group`` with equal prompts (column ``prompt_length``) share
    one copy of the prompt, and rows of an episode (column ``branch``) one of all tokens, trained or not, before they
    differ from the row before; a batch without the first two columns shares nothing. A shared token has the first row's
    experts. Exact for models that mix tokens by attention alone. Raises what `get_loss_mask` raises.
    """
    trained = get_loss_mask(batch).nonzero().flatten()
    shared = _count_shared(batch) if share_prefix else [0] * len(batch)
    segment, tokens = batch.segment, batch.token["tokens"].to(torch.int64)
    position = torch.arange(batch.tokens_total) - batch.offsets[segment]
    repeated = torch.tensor(shared, dtype=torch.int64)
    kept = position >= repeated[segment]
    row_index = kept.cumsum(0) - 1
    for (before, start), count in zip(pairwise(batch.offsets.tolist()), shared[1:], strict=False):
        if count:
            row_index[start : start + count] = row_index[before : before + count]
    forks = torch.where(repeated > 0, row_index[batch.offsets[:-1] + repeated - 1] + 1, 0)
    blocks = list(_lay_out((batch.lengths - repeated).tolist(), forks.tolist()))
    images = _place_images(batch, row_index, repeated)
    two_way = join_neighbours(images) if two_way_images else ()
    if two_way:
        blocks = [cut for block in blocks for cut in _split_block(block, two_way)]
    return Layout(
        tokens=tokens[kept],
        positions=position[kept],
        blocks=tuple(blocks),
        predictors=row_index[trained - 1],
        targets=tokens[trained],
        segment=segment[trained],
        last=row_index[batch.offsets[1:] - 1],
        candidates=batch.token["candidates"][trained].to(torch.int64) if "candidates" in batch else None,
        copies=row_index.bincount(minlength=int(kept.sum())),
        stacking=_index_stacking(blocks),
        experts=batch.token["routed_experts"][kept] if "routed_experts" in batch else None,
        images=images,
        axes=None if axes is None else axes[:, kept],
        two_way=two_way,
    )


def _place_images(batch: Batch, row_index: Tensor, repeated: Tensor) -> tuple[ImageSpan, ...]:
    """The spans of the batch's images in the row. Of a prompt that is laid down once there is one of each."""
    if (column := batch.get("images")) is None:
        return ()
    starts, hidden = batch.offsets.tolist(), repeated.tolist()
    return tuple(
        replace(span, start=int(row_index[starts[row] + span.start]))
        for row, spans in enumerate(column)
        for span in spans
        if span.start >= hidden[row]
    )


def join_neighbours(images: Iterable[ImageSpan]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each run of placeholders; images side by side are one run."""
    runs: list[tuple[int, int]] = []
    for span in sorted(images, key=lambda span: span.start):
        if runs and runs[-1][1] == span.start:
            runs[-1] = (runs[-1][0], span.stop)
        else:
            runs.append((span.start, span.stop))
    return tuple(runs)


def _split_block(block: Block, two_way: Iterable[tuple[int, int]]) -> Iterator[Block]:
    """Give each span a block of its own, if any of them has two-way attention."""
    if len(block.lengths) == 1 or not any(block.start <= start < block.stop for start, _ in two_way):
        yield block
        return
    yield from (Block(start, (stop - start,), block.prefix) for start, stop in block.spans)


def _lay_out(tails: list[int], forks: list[int]) -> Iterator[Block]:
    """Yield the blocks of a row that holds the last ``tails[n]`` tokens of sequence n, one sequence after the other.

    The first of them continues the token before position ``forks[n]`` of the row, 0: none. A span ends there.
    """
    continued: dict[int, int] = {}  # start of a span -> the end of the one that it continues, 0: none
    cuts, end = set(forks), 0
    for tail, fork in zip(tails, forks, strict=True):
        continued.setdefault(fork, fork)
        continued[end] = fork
        end += tail
    spans = list(pairwise(sorted({start for start in continued if start < end} | {end})))
    paths: dict[int, tuple[tuple[int, int], ...]] = {0: ()}  # end of a span -> the spans from the first token to there
    for start, stop in spans:
        paths[stop] = (*paths[continued[start]], (start, stop))
    for (_, fork), group in groupby(spans, lambda span: (span[1] in cuts and span[1], continued[span[0]])):
        neighbours = list(group)
        yield from _blocks(neighbours[0][0], [stop - start for start, stop in neighbours], paths[fork])


def _blocks(start: int, lengths: list[int], prefix: tuple[tuple[int, int], ...]) -> Iterator[Block]:
    """Cut spans that lie end to end from ``start`` into blocks, where padding to one length would waste a third."""
    prefix_length = sum(stop - start for start, stop in prefix)
    taken: list[int] = []
    for n in lengths:
        longest = max([n, *taken])
        needed = sum(m * (prefix_length + m) for m in [n, *taken])
        if taken and (len(taken) + 1) * longest * (prefix_length + longest) > 1.5 * needed:
            yield Block(start, tuple(taken), prefix)
            start += sum(taken)
            taken = []
        taken.append(n)
    if taken:
        yield Block(start, tuple(taken), prefix)


def _count_shared(batch: Batch) -> list[int]:
    """How many leading tokens each sequence shares with the one before it: all that are equal if it is a later row of
    an episode, else a prompt that is all the same, of one group."""
    shared = [0] * len(batch)
    if "group" not in batch or "prompt_length" not in batch:
        return shared
    groups, prompts = (cast(Tensor, batch[name]).tolist() for name in ("group", "prompt_length"))
    branches = cast(Tensor, batch["branch"]).tolist() if "branch" in batch else [0] * len(batch)
    for row in range(1, len(batch)):
        if groups[row - 1] == groups[row] and branches[row]:
            shared[row] = _count_equal(batch, row, int(batch.lengths[row - 1 : row + 1].min()))
        elif groups[row - 1] == groups[row] and prompts[row - 1] == prompts[row]:
            count = _count_equal(batch, row, prompts[row])
            shared[row] = count if count == prompts[row] else 0
    return shared


def _count_equal(batch: Batch, row: int, longest: int) -> int:
    """How many of the first ``longest`` tokens of a sequence the one before has, up to an image that is another."""
    tokens, (before, start) = batch.token["tokens"], batch.offsets[row - 1 : row + 1].tolist()
    differ = (tokens[start : start + longest] != tokens[before : before + longest]).nonzero()
    count = int(differ[0]) if len(differ) else longest
    if (images := batch.get("images")) is not None:
        count = min([count, *(span.start for span in {*images[row - 1]} ^ {*images[row]})])
        for start, stop in (*join_neighbours(images[row - 1]), *join_neighbours(images[row])):
            count = start if start < count < stop else count  # images side by side may see each other
    return count
