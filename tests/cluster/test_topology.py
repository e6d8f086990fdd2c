"""Which devices lie close together, read from a machine that is written down here."""

from __future__ import annotations

import subprocess
from unittest.mock import Mock

import pytest

from coalign.cluster.placement.nodes import find_accelerator, group_devices, read_nvidia_buses

# (PCI address, NUMA node, way through the PCI tree)
MACHINE = {
    "0": ("0000:1b:00.0", 1, "pci0000:15/0000:19:00.0"),
    "1": ("0000:3b:00.0", 0, "pci0000:36/0000:39:00.0"),
    "2": ("0000:5d:00.0", 0, "pci0000:50/0000:58:00.0"),
    "3": ("0000:3c:00.0", 0, "pci0000:36/0000:39:01.0"),
    "4": ("0000:9d:00.0", 1, "pci0000:15/0000:99:00.0"),
}


@pytest.fixture
def pci(tmp_path):
    """A copy of what sysfs says: each device a link into the tree."""
    links = tmp_path / "bus"
    links.mkdir()
    for address, numa, way in MACHINE.values():
        device = tmp_path / "devices" / way / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (links / address).symlink_to(device)
    return links


def test_devices_of_a_numa_node_stand_together_in_the_order_of_their_buses(pci):
    buses = {name: address for name, (address, _, _) in MACHINE.items()}
    assert group_devices(["0", "1", "2", "3", "4"], buses, pci) == [["1", "3", "2"], ["0", "4"]]
    assert group_devices(["4", "2"], buses, pci) == [["2"], ["4"]]


def test_unknown_devices_keep_their_order(pci):
    assert group_devices(["3", "1", "7"], {}, pci) == [["3", "1", "7"]]
    assert group_devices(["7", "0"], {"0": MACHINE["0"][0]}, pci) == [["0"], ["7"]]
    assert group_devices([], {}) == []


def test_what_the_driver_says():
    told = "0, GPU-aaaa, 00000000:1B:00.0\n1, GPU-bbbb, 00000000:3B:00.0\n"
    buses = read_nvidia_buses(lambda command, text: told)
    assert buses == {"0": "0000:1b:00.0", "GPU-aaaa": "0000:1b:00.0", "1": "0000:3b:00.0", "GPU-bbbb": "0000:3b:00.0"}


def test_no_driver_is_no_error_and_one_that_fails_is_not_hidden():
    assert read_nvidia_buses(Mock(side_effect=FileNotFoundError("nvidia-smi"))) == {}
    with pytest.raises(subprocess.CalledProcessError):
        read_nvidia_buses(Mock(side_effect=subprocess.CalledProcessError(9, "nvidia-smi")))


def test_kinds_of_devices():
    assert (find_accelerator("GPU").device, find_accelerator("GPU").visible) == ("cuda", "CUDA_VISIBLE_DEVICES")
    assert find_accelerator("NPU").visible == "ASCEND_RT_VISIBLE_DEVICES"
    assert find_accelerator("chip").device == "cpu"
