"""The layout of a micro-batch in one packed row of tokens, where a group's responses share one copy of its prompt.

    batch     [p p p a a] [p p p b b b] [q q c]          three sequences, the first two of one group
    row       p p p a a b b b q q c                      position_ids 0 1 2 3 4 3 4 5 0 1 2

Pure index arithmetic on the host, without models or losses. coalign.backends.attention reads the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from coalign.data.batch import Batch
from coalign.devices import move_tensors


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring spans that one attention call takes: each span attends causally to itself, and to ``prefix``.

    The spans lie end to end from ``start``. ``prefix``: (start, stop) of the earlier one-span block that each of them
    continues, or None.
    """

    start: int
    lengths: tuple[int, ...]
    prefix: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        return self.start + sum(self.lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether its spans differ in length."""
        return len(set(self.lengths)) > 1


@dataclass(frozen=True, slots=True)
class Layout:
    """One packed row of P tokens that holds N sequences with T trained tokens.

    ``blocks`` cover the row in order, every token once. Trained tokens are in the order of the batch; the hidden state
    at position ``predictors[t]`` of the row predicts trained token t.
    """

    tokens: Tensor  # i64[P]
    positions: Tensor  # i64[P], the token's index within its sequence
    blocks: tuple[Block, ...]
    predictors: Tensor  # i64[T]
    targets: Tensor  # i64[T], the trained tokens
    segment: Tensor  # i64[T], the sequence of each trained token
    last: Tensor  # i64[N], the position in the row of each sequence's last token
    candidates: Tensor | None = None  # i64[T, K], the batch's column at the trained tokens
    copies: Tensor | None = None  # i64[P], how many sequences share the token; 0: padding
    padding: Tensor | None = None  # i64, what `index_padding` says of the blocks
    experts: Tensor | None = None  # i16[P, L, k], the batch's column `routed_experts` at the tokens of the row

    def to(self, device: torch.device | str) -> Layout:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **move_tensors({n: v for n, v in values.items() if isinstance(v, Tensor)}, device))


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


def pack(batch: Batch, *, share_prefix: bool = True) -> Layout:
    """The layout of ``batch``.

    With ``share_prefix``, neighbouring sequences of one ``group`` with equal prompts (column ``prompt_length``) share
    one copy of the prompt; a batch without these columns shares nothing. Exact for models that mix tokens by attention
    alone. Raises what `get_loss_mask` raises.
    """
    where = get_loss_mask(batch).nonzero().flatten()
    runs = list(_runs(batch, share_prefix))
    # The row is the batch without the prompts that repeat the one in the first row of their run.
    repeated, first = torch.zeros(len(batch), dtype=torch.int64), torch.arange(len(batch))
    for start, stop, shared in runs:
        repeated[start + 1 : stop], first[start:stop] = shared, start
    segment, tokens = batch.segment, batch.token["tokens"].to(torch.int64)
    position = torch.arange(batch.tokens_total) - batch.offsets[segment]
    kept = position >= repeated[segment]
    place = kept.cumsum(0) - 1
    place = torch.where(kept, place, place[batch.offsets[first][segment] + position])
    blocks: list[Block] = []
    for start, stop, shared in runs:
        at = int(place[batch.offsets[start]])
        if shared:
            blocks.append(Block(at, (shared,)))
        own = [n - shared for n in batch.lengths[start:stop].tolist() if n > shared]
        blocks += _blocks(at + shared, own, (at, at + shared) if shared else None)
    return Layout(
        tokens=tokens[kept],
        positions=position[kept],
        blocks=tuple(blocks),
        predictors=place[where - 1],
        targets=tokens[where],
        segment=segment[where],
        last=place[batch.offsets[1:] - 1],
        candidates=batch.token["candidates"][where].to(torch.int64) if "candidates" in batch else None,
        copies=place.bincount(minlength=int(kept.sum())),
        padding=index_padding(blocks),
        experts=batch.token["routed_experts"][kept] if "routed_experts" in batch else None,
    )


def index_padding(blocks: Sequence[Block]) -> Tensor:
    """Index the spans of each block in a matrix [n, longest], one block after the other; i64.

    For each block whose spans differ in length: the token of the block at each entry of the matrix (shorter spans are
    padded with their last token), then the entry of each token. Nothing for the other blocks: they need no padding.
    """
    found = [torch.zeros(0, dtype=torch.int64)]
    for block in blocks:
        if block.is_ragged:
            longest = max(block.lengths)
            lengths = torch.tensor(block.lengths)
            starts = (lengths.cumsum(0) - lengths)[:, None]
            column = torch.arange(longest)
            found.append((starts + column.clamp(max=lengths[:, None] - 1)).flatten())
            found.append((column < lengths[:, None]).flatten().nonzero().flatten())
    return torch.cat(found)


def _blocks(start: int, lengths: list[int], prefix: tuple[int, int] | None) -> Iterator[Block]:
    """Cut spans that lie end to end from ``start`` into blocks, where padding to one length would waste a third."""
    before = prefix[1] - prefix[0] if prefix else 0
    taken: list[int] = []
    for n in lengths:
        longest = max([n, *taken])
        needed = sum(m * (before + m) for m in [n, *taken])
        if taken and (len(taken) + 1) * longest * (before + longest) > 1.5 * needed:
            yield Block(start, tuple(taken), prefix)
            start += sum(taken)
            taken = []
        taken.append(n)
    if taken:
        yield Block(start, tuple(taken), prefix)


def _runs(batch: Batch, share_prefix: bool) -> Iterator[tuple[int, int, int]]:
    """(start, stop, shared): runs of neighbouring rows, and how many leading tokens the rows of each share. Neighbours
    that share nothing form one run, too, so that attention can take them together."""
    if not (share_prefix and "group" in batch and "prompt_length" in batch):
        yield from [(0, len(batch), 0)] if len(batch) else []
        return
    groups, prompts = (cast(Tensor, batch[name]).tolist() for name in ("group", "prompt_length"))
    start = alone = 0
    while start < len(batch):
        stop = start + 1
        while stop < len(batch) and groups[stop] == groups[start] and _same_prompt(batch, start, stop, prompts):
            stop += 1
        if stop - start > 1:
            if alone < start:
                yield alone, start, 0
            yield start, stop, prompts[start]
            alone = stop
        start = stop
    if alone < len(batch):
        yield alone, len(batch), 0


def _same_prompt(batch: Batch, a: int, b: int, prompts: list[int]) -> bool:
    n = prompts[a]
    if n < 1 or n != prompts[b]:
        return False
    i, j = int(batch.offsets[a]), int(batch.offsets[b])
    tokens = batch.token["tokens"]
    return torch.equal(tokens[i : i + n], tokens[j : j + n])
