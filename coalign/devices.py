"""Devices beside the CPU: what torch.accelerator leaves open, and all that only CUDA has.

Everything else calls torch.accelerator, which serves CUDA, ROCm (`cuda` to torch), XPU, NPU, HPU and others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: public, but not in __all__

from coalign.processes.host import list_memory_limits

Device = torch.device | str
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_generators: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)
_generators_lock = threading.Lock()


def is_accelerator(device: Device) -> bool:
    """Whether work on ``device`` runs beside the host, which has to wait for it."""
    return torch.device(device).type not in ("cpu", "meta")


def count_devices(device_type: str) -> int:
    """Count the devices of a type (`cuda`, `npu`, …) that torch can use on this machine."""
    count = getattr(getattr(torch, device_type, None), "device_count", None)
    return count() if count is not None and device_type != "cpu" else 0


def measure_memory(device_type: str) -> int:
    """Measure the bytes of memory of the smallest device of a type here; for `cpu` those of the host or container."""
    if device_type != "cpu":
        return min(torch.accelerator.get_memory_info(index)[1] for index in range(count_devices(device_type)))
    return min([psutil.virtual_memory().total, *list_memory_limits()])


def use_device(device: Device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is this thread's current one: the only one for which libraries wait."""
    return torch.accelerator.device_index(torch.device(device).index) if is_accelerator(device) else nullcontext()


def move_tensors(tensors: Mapping[Key, Tensor], device: Device) -> dict[Key, Tensor]:
    """Copy tensors from the host to ``device``; those of one dtype travel in one copy, and share its memory there.

    A copy that the host waits for takes longer to begin than a few thousand numbers take to travel.
    """
    by_dtype: dict[torch.dtype, list[Key]] = {}
    for name, tensor in tensors.items():
        if tensor.device == torch.device(device):
            continue
        by_dtype.setdefault(tensor.dtype, []).append(name)
    moved = dict(tensors)
    for names in by_dtype.values():
        joined = torch.cat([tensors[name].flatten() for name in names]).to(device)
        pieces = joined.split([tensors[name].numel() for name in names])
        moved |= {name: piece.view(tensors[name].shape) for name, piece in zip(names, pieces, strict=True)}
    return moved


@contextmanager
def keep_generator(device: Device) -> Iterator[None]:
    """Restore the random generator of ``device`` after the block. Other threads that keep it wait."""
    device = torch.device(device)
    with _generators_lock:
        lock = _generators[device]
    with lock, use_device(device):
        module = torch.get_device_module(device) if is_accelerator(device) else torch  # both mean the current device
        state = module.get_rng_state()
        try:
            yield
        finally:
            module.set_rng_state(state)


@contextmanager
def seed_generator(device: Device, seed: int) -> Iterator[None]:
    """Draw from ``seed`` on ``device`` within this context; the generator then goes on where it was.

    `torch.manual_seed` would seed the generators of all devices, also of those on which other models draw.
    """
    with keep_generator(device):
        if is_accelerator(device):
            torch.get_device_module(device).manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


class DeviceGraph(Protocol):
    """Kernels that a device runs again, in the same order, on the same memory."""

    def replay(self) -> None:
        """Launch the kernels."""

    def pool(self) -> Any:
        """Return the id of the graph's own memory pool."""
        ...


def has_graphs(device: Device) -> bool:
    """Whether torch captures kernels of ``device`` in graphs: on CUDA, on ROCm, and where torch.accelerator does."""
    if torch.device(device).type == "cuda":
        return True
    try:
        return is_accelerator(device) and torch.accelerator.Graph() is not None
    except (AttributeError, RuntimeError):
        return False


def capture_graph(compute: Callable[[], Value], device: torch.device, pool: Any = None) -> tuple[DeviceGraph, Value]:
    """Capture what ``compute`` launches, which does not run; return the graph, and what ``compute`` returned.

    ``pool`` is that of a graph which never runs at the same time: they share memory. Raises RuntimeError where
    ``compute`` waits for the device, and OutOfMemoryError.
    """
    # Other threads may allocate memory meanwhile, which CUDA would refuse by default.
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        begin = partial(graph.capture_begin, pool, "thread_local")
    else:
        graph = torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")
        begin = graph.capture_begin
    here, aside = torch.accelerator.current_stream(device), torch.Stream(device)
    aside.wait_stream(here)
    with aside:
        begin()
        try:
            result = compute()
        except BaseException:
            with suppress(RuntimeError):  # the graph is incomplete
                graph.capture_end()
            raise
        graph.capture_end()
    here.wait_stream(aside)
    return graph, result


# ---- CUDA alone


def find_gpu_uuid(device: Device) -> str | None:
    """Return the id of a CUDA device, the same in all processes; None for any other."""
    is_cuda = torch.device(device).type == "cuda"
    return str(torch.cuda.get_device_properties(device).uuid) if is_cuda else None


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


def start_cuda_capture(name: str) -> bool:
    """Start the capture of `nsys profile --capture-range=cudaProfilerApi` with a range; False without CUDA."""
    if not torch.cuda.is_available():
        return False
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(name)
    return True


def stop_cuda_capture() -> None:
    """End the capture and its range."""
    torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.stop()


def mark_cuda_range(name: str) -> AbstractContextManager[object]:
    """Return a context that nsys shows under this name."""
    return torch.cuda.nvtx.range(name)


def write_cuda_snapshot(file: Path) -> bool:
    """Write the allocator's memory (for pytorch.org/memory_viz); False if this process has not used CUDA."""
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.memory._dump_snapshot(str(file))
    return True


def make_nccl_group(
    store: TCPStore, rank: int, size: int, timeout: timedelta, device: torch.device
) -> dist.ProcessGroupNCCL:
    """Make a group of CUDA devices outside of torch.distributed's registry."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    torch.cuda.set_device(device)
    return dist.ProcessGroupNCCL(store, rank, size, options)
