"""Transport between processes on one GPU, through device memory that all of them map (CUDA IPC handles).

It is coalign.weights.sync.shared_memory with segments of device memory. These take the model's size, and twice that
where readers compute in place. A handle opens only where the GPU itself is visible, and Ray shows each worker its own
GPU alone; so sender and readers have to be on the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from coalign.config.schema import SyncConfig
from coalign.weights.sync.shared_memory import SharedMemoryTransport
from coalign.weights.sync.transport import WeightEndpoint

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel


class DeviceSegment:
    """Bytes u8[size] of a GPU's memory.

    One process creates it; others open its ``address`` and may only read.
    """

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


class CudaIpcTransport(SharedMemoryTransport):
    """Raises ValueError unless all ranks are on one GPU."""

    segment = DeviceSegment
    memory = "cuda"

    def __init__(
        self,
        source: DistModel,
        target: DistModel,
        config: SyncConfig,
        senders: Sequence[WeightEndpoint],
        readers: Sequence[WeightEndpoint],
    ) -> None:
        super().__init__(source, target, config, senders, readers)
        devices = sorted({endpoint.gpu or "CPU" for endpoint in [*senders, *readers]})
        if len(devices) > 1 or devices == ["CPU"]:
            raise ValueError(
                f"sync.transport: `cuda_ipc` needs {source.name} and {target.name} on one GPU; they are on "
                f"{', '.join(devices)}; use shared_memory or broadcast"
            )
