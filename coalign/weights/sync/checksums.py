"""Checksums of tensors, and copies with checksums.

A checksum depends on a tensor's bytes alone, so it is equal on every machine and device. A tensor is cut into blocks of
BLOCK bytes, which are the units of work of threads. The checksum of one block is a sum over its words, each times a
factor of its position (ChecksumShares); that of several blocks is that sum over theirs.

To save time a check may look at some of the bytes: with a ``turn`` (a count of syncs) at one of SHARES shares of
every block, another share each turn; without one (None) at everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from coalign.cpu import operations

Key = TypeVar("Key")
Bytes = Tensor | np.ndarray  # u8[n]; an array is on the host
BLOCK = 16 * 2**20  # bytes
PIECE = 256 * 2**10  # bytes: a share consists of pieces spread over the block
SHARES = 8
STEP = 0x1E3779B97F4A7C16  # even, so that all factors are odd: from one factor of a word to the next
AT_ONCE = 64 * 2**20  # bytes of tensors that are copied or summed together; readers hear of them when they are done


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return a tensor's bytes as u8[numel * itemsize] on the host; a view if it lies there contiguously."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """Return the 64-bit checksum of an array u8[n] on the host."""
    return _combine_checksums(_checksum_blocks([data[start:stop] for start, stop in _split_blocks(len(data))]))


def _split_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each block of ``size`` bytes; there is at least one, maybe empty."""
    for start in range(0, max(size, 1), BLOCK):
        yield start, min(start + BLOCK, size)


def _select_pieces(size: int, turn: int | None) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each piece of a block of ``size`` bytes that this turn looks at; at least one."""
    if turn is None:
        yield 0, size
        return
    shares = max(1, min(SHARES, -(-size // PIECE)))
    for start in range(turn % shares * PIECE, max(size, 1), shares * PIECE):
        yield start, min(start + PIECE, size)


def _checksum_blocks(blocks: Sequence[Bytes], turn: int | None = None, threads: int = 1) -> list[int]:
    """Return the checksum of each block u8[n], computed where it is."""
    if operations.has_copy_kernel(*(block for block in blocks if isinstance(block, Tensor))):
        return operations.sum_blocks(blocks, operations.ChecksumShares(PIECE, SHARES, STEP, turn), threads)
    return [_checksum_block(block, turn) for block in blocks]


def _combine_checksums(checksums: Sequence[int]) -> int:
    """Return the checksum of a tensor from those of its blocks, in order."""
    if len(checksums) == 1:
        return checksums[0]
    return _sum_words([np.array(checksums, dtype="<u8").view(np.uint8)])


def copy_tensors(jobs: Iterable[tuple[Key, Tensor, Tensor]], turn: int | None = None) -> Iterator[tuple[Key, int]]:
    """Copy each (key, tensor, target u8[nbytes]); yield (key, checksum of the tensor) in order, as they are done."""
    cut = ((key, (tensor.detach().contiguous().reshape(-1).view(torch.uint8), into)) for key, tensor, into in jobs)
    for keys, pairs in _gather(cut):
        if not operations.has_copy_kernel(*(target for _, target in pairs)):
            for source, target in pairs:
                target.copy_(source)
            sums = _checksum_blocks([source for source, _ in pairs], turn)
        else:
            shares = operations.ChecksumShares(PIECE, SHARES, STEP, turn)
            on_host = [(source.cpu(), target) for source, target in pairs]
            sums = operations.copy_blocks(on_host, shares, torch.get_num_threads())
        yield from _combine_each(keys, sums)


def checksum_tensors(tensors: Iterable[tuple[Key, Tensor]], turn: int | None = None) -> Iterator[tuple[Key, int]]:
    """Yield (key, checksum) of each (key, u8[nbytes]), in order."""
    # One share takes as little time as handing it to another thread.
    threads = torch.get_num_threads() if turn is None else 1
    for keys, blocks in _gather((key, (data,)) for key, data in tensors):
        yield from _combine_each(keys, _checksum_blocks([block for (block,) in blocks], turn, threads))


def _gather(
    jobs: Iterable[tuple[Key, tuple[Tensor, ...]]],
) -> Iterator[tuple[list[tuple[Key, int]], list[tuple[Tensor, ...]]]]:
    """Cut the tensors u8[n] of each job, all of one size, into blocks; yield them about AT_ONCE bytes at a time. Each
    item has the keys of the jobs with their numbers of blocks, and the blocks."""
    keys: list[tuple[Key, int]] = []
    blocks: list[tuple[Tensor, ...]] = []
    size = 0
    for key, tensors in jobs:
        tensor_size = tensors[0].numel()
        cut = [tuple(tensor[start:stop] for tensor in tensors) for start, stop in _split_blocks(tensor_size)]
        keys.append((key, len(cut)))
        blocks += cut
        size += tensor_size
        if size >= AT_ONCE:
            yield keys, blocks
            keys, blocks, size = [], [], 0
    if keys:
        yield keys, blocks


def _combine_each(keys: list[tuple[Key, int]], sums: Sequence[int]) -> Iterator[tuple[Key, int]]:
    first = 0
    for key, count in keys:
        yield key, _combine_checksums(sums[first : first + count])
        first += count


def _checksum_block(block: Bytes, turn: int | None) -> int:
    """The checksum of one block u8[n] without a kernel."""
    pieces = [block[start:stop] for start, stop in _select_pieces(len(block), turn)]
    if not isinstance(block, Tensor) or block.device.type == "cpu":
        return _sum_words([np.asarray(piece) for piece in pieces])
    return _sum_device_words(torch.cat([piece for piece in pieces if isinstance(piece, Tensor)]))


def _sum_device_words(data: Tensor) -> int:
    """The result of ``_sum_words``, for data u8[n] on its device."""
    words = torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    factors = torch.arange(len(words), device=data.device) * STEP + 1
    return (int((words * factors).sum()) + len(data)) % 2**64


def _sum_words(pieces: Sequence[np.ndarray]) -> int:
    """Return Σ word_i · (i · STEP + 1), and the number of bytes, mod 2^64: any change of a single word shows, and any
    two words that change places. All ``pieces`` u8[n] but the last are whole words."""
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    words = np.pad(data, (0, -len(data) % 8)).view("<u8")
    factors = np.arange(len(words), dtype=np.uint64) * np.uint64(STEP) + np.uint64(1)
    return (int((words * factors).sum(dtype=np.uint64)) + len(data)) % 2**64
