"""Copies and checksums by several threads: a tensor's blocks are the pieces of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from coalign.weights.checksum import block_checksum, blocks, combine

Key = TypeVar("Key")
CACHED = 256 * 2**10  # bytes, less than a core's own cache
AHEAD = 256 * 2**20  # bytes of tensors that may wait for their turn: a gathered tensor is freed after its copy


def copied(jobs: Iterable[tuple[Key, Tensor, Tensor]]) -> Iterator[tuple[Key, int]]:
    """Copy each (key, tensor, into u8[nbytes]); (key, checksum) in order, as they are done."""

    def pieces() -> Iterator[tuple[Key, list[tuple[Tensor, ...]]]]:
        for key, tensor, into in jobs:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            yield key, [(flat[start:stop], into[start:stop]) for start, stop in blocks(len(into))]

    return _spread(pieces(), _copy)


def checked(tensors: Iterable[tuple[Key, Tensor]]) -> Iterator[tuple[Key, int]]:
    """(key, checksum) of each (key, u8[nbytes]), in order."""
    pieces = ((key, [(data[start:stop],) for start, stop in blocks(len(data))]) for key, data in tensors)
    return _spread(pieces, block_checksum)


def _spread(
    jobs: Iterable[tuple[Key, list[tuple[Tensor, ...]]]], work: Callable[..., int]
) -> Iterator[tuple[Key, int]]:
    """``work`` on the pieces of each job, by as many threads as torch computes with; the checksums combined."""
    threads = torch.get_num_threads()
    if threads == 1:
        for key, pieces in jobs:
            yield key, combine([work(*piece) for piece in pieces])
        return
    waiting: deque[tuple[Key, int, list[Future[int]]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(threads) as pool:
        for key, pieces in jobs:
            size = sum(len(piece[0]) for piece in pieces)
            waiting.append((key, size, [pool.submit(work, *piece) for piece in pieces]))
            ahead += size
            while waiting and (ahead > AHEAD or waiting[0][2][-1].done()):
                ahead -= waiting[0][1]
                yield _finished(waiting.popleft())
        while waiting:
            yield _finished(waiting.popleft())


def _finished(job: tuple[Key, int, list[Future[int]]]) -> tuple[Any, int]:
    key, _, parts = job
    return key, combine([part.result() for part in parts])


def _copy(source: Tensor, target: Tensor) -> int:
    """The checksum is that of the source. On the host both are done piece by piece, so that the second finds the piece
    in the cache; by numpy, since every thread that computes by torch brings helpers of its own."""
    if target.device.type != "cpu":
        target.copy_(source)
        return block_checksum(target)
    given, taken, state = source.cpu().numpy(), target.numpy(), xxhash.xxh3_64()
    for start in range(0, len(given), CACHED):
        piece = given[start : start + CACHED]
        taken[start : start + CACHED] = piece
        state.update(piece)
    return state.intdigest()
