"""Transport between processes on one GPU, through memory there that all of them map (CUDA's handles).

It is coalign.weights.sync.shared_memory with segments of device memory: the model's size of it, twice where readers compute
in place. Handles open only where the GPU itself is visible, and Ray shows each worker its own alone; so sender and
readers have to be on the same one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from coalign.weights.sync.shared_memory import SharedMemory
from coalign.weights.sync.transport import SyncedModel, WeightEndpoint


class DeviceSegment:
    """Bytes u8[size] of a GPU's memory: ``create`` them in one process, ``open`` their ``address`` in others, which may
    only read."""

    def __init__(self, address: Any, data: Tensor) -> None:
        self.address, self.bytes = address, data

    @staticmethod
    def create(size: int, device: str) -> DeviceSegment:
        """Raises torch.OutOfMemoryError."""
        data = torch.empty(size, dtype=torch.uint8, device=device)
        return DeviceSegment(reduce_tensor(data), data)

    @staticmethod
    def open(address: Any) -> DeviceSegment:
        rebuild, arguments = address
        return DeviceSegment(address, rebuild(*arguments))


class CudaIpc(SharedMemory):
    """ValueError unless all ranks are on one GPU."""

    segment = DeviceSegment
    memory = "cuda"

    def __init__(
        self,
        source: SyncedModel,
        target: SyncedModel,
        config: Any,
        senders: list[WeightEndpoint],
        readers: list[WeightEndpoint],
    ) -> None:
        super().__init__(source, target, config, senders, readers)
        devices = sorted({place.gpu or "CPU" for place in [*senders, *readers]})
        if len(devices) > 1 or devices == ["CPU"]:
            raise ValueError(
                f"sync.transport: `cuda_ipc` needs {source.name} and {target.name} on one GPU; they are on "
                f"{', '.join(devices)}; use shared_memory or broadcast"
            )
