"""Copies between device and host memory: host buffers in large blocks, a separate CUDA stream for the copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

BLOCK = 256 * 2**20  # bytes; a power of two, because torch rounds pinned memory up to one
ALIGNMENT = 64


def allocate_host(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Allocate one host buffer (u8[size]) for each size, cut from blocks of up to ``BLOCK`` bytes.

    A larger buffer has a block to itself. A block is freed together with the last buffer in it.
    """
    buffers: list[Tensor] = []
    for group in _group_by_block(sizes):
        block = torch.empty(sum(map(_align, group)), dtype=torch.uint8, pin_memory=pinned)
        start = 0
        for size in group:
            buffers.append(block[start : start + size])
            start += _align(size)
    return buffers


def get_storage(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor; of a DTensor, that of this process's shard."""
    return getattr(tensor, "to_local", lambda: tensor)().untyped_storage()


def view_bytes(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a u8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def make_resizable(tensors: Iterable[Tensor]) -> None:
    """Move tensors to memory that torch can free, where they lie in a mapped file or in shared memory."""
    moved: dict[tuple[object, ...], Tensor] = {}
    for tensor in tensors:
        if not get_storage(tensor).resizable():
            source = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if source not in moved:
                moved[source] = tensor.detach().clone()
            tensor.data = moved[source]


@contextmanager
def copy_stream(device: torch.device, *, after_compute: bool) -> Iterator[None]:
    """Run the copies of a block on a separate CUDA stream, and wait for them at its end.

    They overlap with the computation on the device; with ``after_compute`` they start once the work queued so far is
    done. On other devices copies are synchronous anyway.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        if after_compute:
            stream.wait_stream(torch.cuda.current_stream())
        try:
            # Memory allocated inside belongs to this stream, so no copy waits for work of other streams.
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


def release_cache(device: torch.device) -> None:
    """Return freed device memory to the driver, so that other processes can have it."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _group_by_block(sizes: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    used = 0
    for size in sizes:
        if group and used + size > BLOCK:
            yield group
            group, used = [], 0
        group.append(size)
        used += _align(size)
    if group:
        yield group


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
