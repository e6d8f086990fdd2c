"""Copies and checksums by several threads: a tensor's blocks are the pieces of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from coalign.weights.sync.buckets import block_checksum, blocks, combine

Key = TypeVar("Key")
AHEAD = 256 * 2**20  # bytes of tensors that may wait for their turn: a gathered tensor is freed after its copy


def copied(jobs: Iterable[tuple[Key, Tensor, Tensor]], turn: int | None = None) -> Iterator[tuple[Key, int]]:
    """Copy each (key, tensor, into u8[nbytes]); (key, checksum) in order, as they are done. ``turn``: of checksums."""

    def cut() -> Iterator[tuple[Key, list[tuple[Tensor, ...]]]]:
        for key, tensor, into in jobs:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            yield key, [(flat[start:stop], into[start:stop]) for start, stop in blocks(len(into))]

    return _spread(cut(), partial(_copy, turn=turn), torch.get_num_threads())


def checked(tensors: Iterable[tuple[Key, Tensor]], turn: int | None = None) -> Iterator[tuple[Key, int]]:
    """(key, checksum) of each (key, u8[nbytes]), in order."""
    cut = ((key, [(data[start:stop],) for start, stop in blocks(len(data))]) for key, data in tensors)
    # The share of a turn is so little that handing it to another thread takes as long.
    return _spread(cut, partial(block_checksum, turn=turn), torch.get_num_threads() if turn is None else 1)


def _spread(
    jobs: Iterable[tuple[Key, list[tuple[Tensor, ...]]]], work: Callable[..., int], threads: int
) -> Iterator[tuple[Key, int]]:
    """``work`` on the blocks of each job; the checksums combined."""
    if threads == 1:
        for key, parts in jobs:
            yield key, combine([work(*part) for part in parts])
        return
    waiting: deque[tuple[Key, int, list[Future[int]]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(threads) as pool:
        for key, parts in jobs:
            size = sum(len(part[0]) for part in parts)
            waiting.append((key, size, [pool.submit(work, *part) for part in parts]))
            ahead += size
            while waiting and (ahead > AHEAD or waiting[0][2][-1].done()):
                ahead -= waiting[0][1]
                yield _finished(waiting.popleft())
        while waiting:
            yield _finished(waiting.popleft())


def _finished(job: tuple[Key, int, list[Future[int]]]) -> tuple[Any, int]:
    key, _, parts = job
    return key, combine([part.result() for part in parts])


def _copy(source: Tensor, target: Tensor, turn: int | None) -> int:
    """The checksum is that of the source. On the host by numpy: every thread that computes by torch brings helpers of
    its own, and copies of numpy go past the caches where the C library is told to."""
    if target.device.type != "cpu":
        target.copy_(source)
        return block_checksum(target, turn)
    source = source.cpu()
    found = block_checksum(source, turn)
    np.copyto(target.numpy(), source.numpy())
    return found
