"""Where the ranks of a model are, as far as it decides how weights reach them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Identity = tuple[str, int]  # host, process


@dataclass(frozen=True, slots=True)
class WeightEndpoint:
    """One rank. ``host`` is equal for processes that can see each other (in /proc). ``sends``: whether it yields
    weights; ``adopts``: whether it computes with the tensors that it is given. ``gpu``: which one its device is.
    ``dtype``: of all its weights, to which it casts what it is given; None: not one."""

    host: str
    process: int
    device: str
    gpu: str | None
    sends: bool
    adopts: bool
    dtype: torch.dtype | None = None

    @property
    def identity(self) -> Identity:
        return self.host, self.process


def place(module: Any, store: Any) -> WeightEndpoint:
    """Of this worker."""
    device = module.context.device
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.startswith("cuda") else None
    return WeightEndpoint(*identity(), device, gpu, module.exports, module.adopts, module.weights_dtype)


def identity() -> Identity:
    """Of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}", os.getpid()


def own_address() -> str:
    """The address of the interface with the default route; without a network that of the loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
