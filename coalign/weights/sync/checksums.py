"""Checksums of tensors, and copies with checksums, by several threads.

A checksum depends on a tensor's bytes alone, so it is equal on every machine. A tensor is cut into blocks of BLOCK
bytes, which are the threads' units of work. The checksum of one block is XXH3; that of several is XXH3 of theirs.
Blocks in a GPU's memory have a sum of another kind, which is computed there.

To save time a check may look at a part of the bytes: with a ``turn`` (a count of syncs) at one of SHARES shares of
every block, another share each turn; without one (None) at everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

Key = TypeVar("Key")
BLOCK = 16 * 2**20  # bytes
PIECE = 256 * 2**10  # bytes: a share consists of pieces spread over the block
SHARES = 8
STEP = 0x1E3779B97F4A7C16  # even: from one factor of a word to the next
AHEAD = 256 * 2**20  # bytes of tensors that may wait for a thread: a gathered tensor is freed after its copy


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return a tensor's bytes as u8[numel * itemsize] on the host; a view if it lies there contiguously."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """Return the 64-bit checksum of an array u8[n] on the host."""
    return combine_checksums([_sum_xxh3([data[start:stop]]) for start, stop in split_blocks(len(data))])


def split_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each block of ``size`` bytes; there is at least one, maybe empty."""
    for start in range(0, max(size, 1), BLOCK):
        yield start, min(start + BLOCK, size)


def select_pieces(size: int, turn: int | None) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each piece of a block of ``size`` bytes that this turn looks at; at least one."""
    if turn is None:
        yield 0, size
        return
    shares = max(1, min(SHARES, -(-size // PIECE)))
    for start in range(turn % shares * PIECE, max(size, 1), shares * PIECE):
        yield start, min(start + PIECE, size)


def checksum_block(block: Tensor, turn: int | None = None) -> int:
    """Return the checksum of one block u8[n], computed on its device."""
    parts = [block[start:stop] for start, stop in select_pieces(len(block), turn)]
    if block.device.type != "cpu":
        return checksum_device_block(torch.cat(parts))
    return _sum_xxh3(part.numpy() for part in parts)


def checksum_device_block(block: Tensor) -> int:
    """Return Σ word_i · m_i mod 2^64 of one block u8[n], with odd m_i.

    So any change of a single word shows, and any two words that change places.
    """
    words = torch.nn.functional.pad(block, (0, -len(block) % 8)).view(torch.int64)
    factors = torch.arange(len(words), device=block.device) * STEP + 1
    return (int((words * factors).sum()) + len(block)) % 2**64


def combine_checksums(checksums: Sequence[int]) -> int:
    """Return the checksum of a tensor from those of its blocks, in order."""
    return checksums[0] if len(checksums) == 1 else _sum_xxh3([np.array(checksums, dtype="<u8")])


def _sum_xxh3(parts: Iterable[np.ndarray]) -> int:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.data)
    return state.intdigest()


# ---- several threads


def copy_tensors(jobs: Iterable[tuple[Key, Tensor, Tensor]], turn: int | None = None) -> Iterator[tuple[Key, int]]:
    """Copy each (key, tensor, target u8[nbytes]); yield (key, checksum of the tensor) in order, as they are done."""

    def cut() -> Iterator[tuple[Key, list[tuple[Tensor, ...]]]]:
        for key, tensor, into in jobs:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            yield key, [(flat[start:stop], into[start:stop]) for start, stop in split_blocks(len(into))]

    return _run_threads(cut(), partial(_copy_block, turn=turn), torch.get_num_threads())


def checksum_tensors(tensors: Iterable[tuple[Key, Tensor]], turn: int | None = None) -> Iterator[tuple[Key, int]]:
    """Yield (key, checksum) of each (key, u8[nbytes]), in order."""
    cut = ((key, [(data[start:stop],) for start, stop in split_blocks(len(data))]) for key, data in tensors)
    # One share takes as little time as handing it to another thread.
    return _run_threads(cut, partial(checksum_block, turn=turn), torch.get_num_threads() if turn is None else 1)


def _run_threads(
    jobs: Iterable[tuple[Key, list[tuple[Tensor, ...]]]], work: Callable[..., int], threads: int
) -> Iterator[tuple[Key, int]]:
    """Apply ``work`` to the blocks of each job; yield its key and the combined checksums."""
    if threads == 1:
        for key, blocks in jobs:
            yield key, combine_checksums([work(*block) for block in blocks])
        return
    waiting: deque[tuple[Key, int, list[Future[int]]]] = deque()
    ahead = 0

    def finish_first() -> tuple[Key, int]:
        nonlocal ahead
        key, size, sums = waiting.popleft()
        ahead -= size
        return key, combine_checksums([each.result() for each in sums])

    with ThreadPoolExecutor(threads) as pool:
        for key, blocks in jobs:
            size = sum(len(block[0]) for block in blocks)
            waiting.append((key, size, [pool.submit(work, *block) for block in blocks]))
            ahead += size
            while waiting and (ahead > AHEAD or waiting[0][2][-1].done()):
                yield finish_first()
        while waiting:
            yield finish_first()


def _copy_block(source: Tensor, target: Tensor, turn: int | None) -> int:
    """Copy a block and return the checksum of its source.

    On the host numpy copies: torch would start helper threads for every thread, and numpy's copies go past the caches
    where the C library is set to.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return checksum_block(target, turn)
    source = source.cpu()
    found = checksum_block(source, turn)
    np.copyto(target.numpy(), source.numpy())
    return found
