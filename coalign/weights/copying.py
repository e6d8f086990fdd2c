"""Copies and checksums by several threads: a tensor's blocks are the pieces of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from coalign.weights.checksum import block_checksum, blocks, combine

Key = TypeVar("Key")
AHEAD = 256 * 2**20  # bytes of tensors that may wait for their copy: a gathered tensor is freed after it


def copied(jobs: Iterable[tuple[Key, Tensor, Tensor]]) -> Iterator[tuple[Key, int]]:
    """Copy each (key, tensor, into u8[nbytes]); (key, checksum) in order, as they are done."""
    waiting: deque[tuple[Key, int, list[Future[int]]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for key, tensor, into in jobs:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            work = [pool.submit(_copy, flat[start:stop], into[start:stop]) for start, stop in blocks(len(into))]
            waiting.append((key, len(into), work))
            ahead += len(into)
            while waiting and (ahead > AHEAD or waiting[0][2][-1].done()):
                done, size, parts = waiting.popleft()
                ahead -= size
                yield done, combine([part.result() for part in parts])
        for done, _, parts in waiting:
            yield done, combine([part.result() for part in parts])


def checked(tensors: Iterable[tuple[Key, Tensor]]) -> Iterator[tuple[Key, int]]:
    """(key, checksum) of each (key, u8[nbytes]), in order."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for key, tensor in tensors:
            parts = [tensor[start:stop] for start, stop in blocks(len(tensor))]
            yield key, combine(list(pool.map(block_checksum, parts)))


def _copy(source: Tensor, target: Tensor) -> int:
    """The checksum is that of the source, where both are on the host: then it is in the cache for the copy. numpy
    copies there, since every thread that computes by torch brings its own helpers."""
    if target.device.type == "cpu":
        source = source.cpu()
        np.copyto(target.numpy(), source.numpy())
        return block_checksum(source)
    target.copy_(source)
    return block_checksum(target)
