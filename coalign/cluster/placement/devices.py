"""Kinds of devices, and which devices of a machine are close to each other (NUMA nodes and PCI buses).

Neighbouring ranks communicate most (a tensor-parallel group at every layer). So they get devices of one NUMA node where
it has enough, in the order of the PCI buses: devices behind one switch, with its network card, are neighbours.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of device: torch's name, and the environment variable that makes devices ``visible`` to a process."""

    device: str
    visible: str


STAND_IN = Accelerator("cpu", "COALIGN_VISIBLE_DEVICES")
ACCELERATORS: Mapping[str, Accelerator] = {
    "GPU": Accelerator("cuda", "CUDA_VISIBLE_DEVICES"),
    "NPU": Accelerator("npu", "ASCEND_RT_VISIBLE_DEVICES"),
    "HPU": Accelerator("hpu", "HABANA_VISIBLE_MODULES"),
}


def find_accelerator(resource: str) -> Accelerator:
    """The kind of device behind a Ray resource; an unknown resource stands for devices on a machine without any."""
    return ACCELERATORS.get(resource, STAND_IN)


PCI = Path("/sys/bus/pci/devices")


def group_devices(names: Sequence[str], buses: Mapping[str, str], pci: Path = PCI) -> list[list[str]]:
    """Group devices by NUMA node, each in the order of the PCI tree; devices that are not known come last.

    ``buses`` gives the PCI address of a device (`0000:3b:00.0`), by any of its names.
    """

    def place(name: str) -> tuple[int, str]:
        bus = pci / buses.get(name, "unknown")
        if not bus.exists():
            return 1 << 30, ""
        return int((bus / "numa_node").read_text()), str(bus.resolve())

    ordered = sorted(names, key=place)
    return [list(near) for _, near in groupby(ordered, key=lambda name: place(name)[0])]


def read_nvidia_buses(ask: Callable[..., str] = subprocess.check_output) -> dict[str, str]:
    """Ask the driver for {index or UUID: PCI address} of the NVIDIA devices; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        lines = ask(command, text=True).splitlines()
    except FileNotFoundError:
        return {}
    buses = {}
    for line in lines:
        index, uuid, bus = (part.strip() for part in line.split(","))
        # Eight digits of the PCI domain there, four in sysfs.
        buses[index] = buses[uuid] = bus.lower()[-12:]
    return buses
