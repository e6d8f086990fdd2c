"""Reports what was in a process's memory when there was not enough."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from coalign import devices

_ROWS = 40


def write_memory_report(error: BaseException, folder: Path, name: str) -> str:
    """Write what is in memory after an out-of-memory error; returns an addition to its message (empty for others).

    ``folder/name.txt`` is a table of the largest tensors. On CUDA, name.pickle is the allocator's snapshot (for
    pytorch.org/memory_viz).
    """
    # The CPU's allocator raises a plain RuntimeError.
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "DefaultCPUAllocator" not in str(error):
        return ""
    table, snapshot = folder / f"{name}.txt", folder / f"{name}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(list_largest_tensors())
        has_snapshot = devices.write_cuda_snapshot(snapshot)
    except OSError as problem:  # must not hide the error of the call
        return f"\nwhat was in memory could not be written: {problem}"
    snapshot_note = f"; the allocator's memory is in {snapshot}" if has_snapshot else ""
    return f"\nthe largest tensors are listed in {table}{snapshot_note}"


def list_largest_tensors() -> str:
    """A table of the tensors that Python can see, by size: MiB, dtype, shape, device.

    Views of the same memory are one row. Tensors that only autograd refers to are missing.
    """
    by_storage: dict[int, Tensor] = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, Parameter) and not item.is_meta and item.layout == torch.strided:
            by_storage.setdefault(item.untyped_storage().data_ptr(), item)
    tensors = sorted(by_storage.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    lines = [f"{total / 2**20:10.1f} MiB in {len(tensors)} tensors"]
    for tensor in tensors[:_ROWS]:
        size, dtype = tensor.untyped_storage().nbytes() / 2**20, str(tensor.dtype).removeprefix("torch.")
        role = "parameter" if isinstance(tensor, Parameter) else "gradient graph" if tensor.grad_fn else ""
        lines.append(f"{size:10.1f} {dtype:<10} {list(tensor.shape)!s:<24} {tensor.device} {role}".rstrip())
    return "\n".join(lines) + "\n"
