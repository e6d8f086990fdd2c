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
    """Copy each (key, tensor, into u8[nbytes] of the host); (key, checksum) in order, as they are done."""
    waiting: deque[tuple[Key, int, list[Future[int]]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for key, tensor, into in jobs:
            flat, target = tensor.detach().contiguous().reshape(-1).view(torch.uint8), into.numpy()
            work = [pool.submit(_copy, flat[a:b], target[a:b]) for a, b in blocks(len(target))]
            waiting.append((key, len(target), work))
            ahead += len(target)
            while waiting and (ahead > AHEAD or waiting[0][2][-1].done()):
                done, size, parts = waiting.popleft()
                ahead -= size
                yield done, combine([part.result() for part in parts])
        for done, _, parts in waiting:
            yield done, combine([part.result() for part in parts])


def checked(tensors: Iterable[tuple[Key, Tensor]]) -> Iterator[tuple[Key, int]]:
    """(key, checksum) of each (key, u8[nbytes] of the host), in order."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for key, tensor in tensors:
            data = tensor.numpy()
            yield key, combine(list(pool.map(lambda ends, d=data: block_checksum(d[slice(*ends)]), blocks(len(data)))))


def _copy(source: Tensor, target: np.ndarray) -> int:
    """The checksum is that of the source: what the reader finds has to agree with it."""
    data = source.cpu().numpy()
    target[:] = data
    return block_checksum(data)
