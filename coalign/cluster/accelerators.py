"""What the kinds of devices are called: by Ray, by torch, and by the variable that shows a process its own ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """``device`` is torch's name, ``visible`` an environment variable that takes the devices' names, by commas."""

    device: str
    visible: str


STAND_IN = Accelerator("cpu", "COALIGN_VISIBLE_DEVICES")
ACCELERATORS: Mapping[str, Accelerator] = {
    "GPU": Accelerator("cuda", "CUDA_VISIBLE_DEVICES"),
    "NPU": Accelerator("npu", "ASCEND_RT_VISIBLE_DEVICES"),
    "HPU": Accelerator("hpu", "HABANA_VISIBLE_MODULES"),
}


def accelerator(resource: str) -> Accelerator:
    """Of a Ray resource; one that is not known stands for devices on a machine without any."""
    return ACCELERATORS.get(resource, STAND_IN)
