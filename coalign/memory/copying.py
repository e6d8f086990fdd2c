"""Bytes between a device and the host: large blocks on the host, a stream of its own on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

BLOCK = 256 * 2**20  # bytes; a power of two, which is what torch rounds pinned memory up to
ALIGNMENT = 64


def host_space(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Room for so many bytes each (u8 [size]), cut from blocks of ``BLOCK`` bytes; what is larger has one to itself.

    A block is freed with the last piece of it.
    """
    space: list[Tensor] = []
    for some in _blocks(sizes):
        block = torch.empty(sum(map(_aligned, some)), dtype=torch.uint8, pin_memory=pinned)
        at = 0
        for size in some:
            space.append(block[at : at + size])
            at += _aligned(size)
    return space


def storage_of(tensor: Tensor) -> UntypedStorage:
    """What a tensor lies in; of a sharded one, this process's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()


def raw(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage (u8), live."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def own(tensors: Iterable[Tensor]) -> None:
    """Give tensors whose memory is not torch's to free (a mapped file, memory shared between processes) their own."""
    moved: dict[tuple[object, ...], Tensor] = {}
    for tensor in tensors:
        if not storage_of(tensor).resizable():
            where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if where not in moved:
                moved[where] = tensor.detach().clone()
            tensor.data = moved[where]


@contextmanager
def copying(device: torch.device, *, after_compute: bool) -> Iterator[None]:
    """The copies inside are done at its end. On CUDA they run beside whatever the device computes, on a stream of their
    own; ``after_compute``: once the work that the device has been given so far is done."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        if after_compute:
            stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):  # memory taken here is of this stream: nobody else's work is waited for
                yield
        finally:
            stream.synchronize()


def give_back(device: torch.device) -> None:
    """Let other processes have the device memory that was freed."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _blocks(sizes: Sequence[int]) -> Iterator[list[int]]:
    some: list[int] = []
    filled = 0
    for size in sizes:
        if some and filled + size > BLOCK:
            yield some
            some, filled = [], 0
        some.append(size)
        filled += _aligned(size)
    if some:
        yield some


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
