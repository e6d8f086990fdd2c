"""What was in memory when there was not enough of it."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

_ROWS = 40


def memory_report(error: BaseException, folder: Path, name: str) -> str:
    """Write ``folder/name.txt``, a table of the largest tensors, and on CUDA name.pickle, the allocator's snapshot (for
    pytorch.org/memory_viz). Returns what to add to the error's message; empty for any other error."""
    if not _out_of_memory(error):
        return ""
    table, snapshot = folder / f"{name}.txt", folder / f"{name}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(largest_tensors())
        if torch.cuda.is_initialized():
            torch.cuda.memory._dump_snapshot(str(snapshot))
    except OSError as problem:  # the error of the run is the other one
        return f"\nwhat was in memory could not be written: {problem}"
    where = f"; the allocator's memory is in {snapshot}" if torch.cuda.is_initialized() else ""
    return f"\nthe largest tensors are listed in {table}{where}"


def largest_tensors() -> str:
    """The tensors that Python can see, by the memory that they hold: MiB, dtype, shape, device. Views of the same
    memory are one row; what only autograd holds is not among them."""
    found: dict[int, Tensor] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, Parameter) and not thing.is_meta and thing.layout == torch.strided:
            found.setdefault(thing.untyped_storage().data_ptr(), thing)
    tensors = sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    lines = [f"{total / 2**20:10.1f} MiB in {len(tensors)} tensors"]
    for tensor in tensors[:_ROWS]:
        size, dtype = tensor.untyped_storage().nbytes() / 2**20, str(tensor.dtype).removeprefix("torch.")
        kind = "parameter" if isinstance(tensor, Parameter) else "gradient graph" if tensor.grad_fn else ""
        lines.append(f"{size:10.1f} {dtype:<10} {list(tensor.shape)!s:<24} {tensor.device} {kind}".rstrip())
    return "\n".join(lines) + "\n"


def _out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
