"""Where the ranks of a model are, as far as it decides how weights reach them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """One rank. ``host`` is equal for processes that can see each other (in /proc); ``address`` is what other hosts
    reach it by. ``sends``: whether it yields weights; ``adopts``: whether it computes with the tensors it is given."""

    host: str
    address: str
    process: int
    device: str
    sends: bool
    adopts: bool


def place(module: Any, store: Any) -> Place:
    """Of this worker."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}"
    device, sends = module.context.device, module.exports
    return Place(host, own_address(), os.getpid(), device, sends, module.adopts and device == "cpu")


def own_address() -> str:
    """The address of the interface with the default route; without a network that of the loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
