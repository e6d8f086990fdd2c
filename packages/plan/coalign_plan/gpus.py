"""What accelerators can do, from their data sheets (dense figures, no sparsity), and clusters of them.

Sources: NVIDIA's data sheets of A100, H100, H200, L40S, RTX A6000, HGX B200 and GB200 NVL72; the Ada whitepaper for the
RTX 4090; AMD's of MI300X; for the variants sold in China (A800, H800, H20) the figures that their sellers publish.
Dollars an hour are of large clouds on demand, rounded, and only a default.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One device: GiB, 10^12 dense FLOP/s by type of number, GB/s of its memory and, one way, of its links in a node.

    A rate that a device does not have is None.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    fp4_tflops: float | None
    fp32_tflops: float
    memory_gb_s: float
    link_gb_s: float
    dollars_per_hour: float
    network_gb_s: float = 50.0  # one way to other nodes, of a usual machine with it: a 400 Gbit/s card each
    link_gpus: int = 8  # devices that the links join: those of a node, or more (NVL72)
    matmul_share: float = 0.75  # a large product reaches this share of the bf16 peak; power and clocks limit it

    def flops(self, precision: str) -> float:
        """Return the peak FLOP/s for bf16, fp8, fp4 or fp32; those of bf16 where the device has no such rate."""
        rate = {"fp8": self.fp8_tflops, "fp4": self.fp4_tflops or self.fp8_tflops, "fp32": self.fp32_tflops}
        return (rate.get(precision) or self.bf16_tflops) * 1e12


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", 40, 312, None, None, 156, 1555, 300, 1.8, 25, 8, 0.87),
        Gpu("A100-80", 80, 312, None, None, 156, 2039, 300, 2.2, 25, 8, 0.87),
        Gpu("A800", 80, 312, None, None, 156, 2039, 200, 2.0, 25, 8, 0.87),
        Gpu("H100", 80, 989, 1979, None, 494, 3350, 450, 4.0, 50, 8, 0.72),
        Gpu("H800", 80, 989, 1979, None, 494, 3350, 200, 4.0, 50, 8, 0.72),
        Gpu("H20", 96, 148, 296, None, 74, 4000, 450, 2.0, 25, 8, 0.93),
        Gpu("H200", 141, 989, 1979, None, 494, 4800, 450, 5.0, 50, 8, 0.74),
        Gpu("B200", 180, 2250, 4500, 9000, 1125, 7700, 900, 7.0, 50, 8, 0.75),
        Gpu("GB200", 186, 2500, 5000, 10000, 1250, 8000, 900, 9.0, 50, 72, 0.75),
        Gpu("B300", 270, 2250, 4500, 13500, 1125, 7700, 900, 9.0, 100, 8, 0.75),
        Gpu("GB300", 279, 2500, 5000, 15000, 1250, 8000, 900, 11.0, 100, 72, 0.75),
        Gpu("MI300X", 192, 1307, 2615, None, 654, 5300, 448, 4.0, 50, 8, 0.45),
        Gpu("L40S", 48, 362, 733, None, 183, 864, 32, 1.5, 25, 8, 0.65),
        Gpu("RTX4090", 24, 165, 330, None, 83, 1008, 25, 0.5, 12, 8, 0.9),
        Gpu("RTXA6000", 48, 155, None, None, 77, 768, 56, 0.8, 12, 8, 0.65),
        Gpu("RTXPRO6000", 96, 503, 1007, 2015, 252, 1597, 55, 2.0, 50, 8, 0.75),
    )
}
ALIASES = {"A100": "A100-80", "4090": "RTX4090", "A6000": "RTXA6000"}
CLUSTER = re.compile(r"(\d{1,9})x(\d{1,9}):(.+)", re.ASCII)
LARGEST = 100_000  # GPUs of a cluster


def find_gpu(name: str) -> Gpu:
    """Return the device of this name, in any spelling. Raises ValueError with the nearest known one."""
    by_name = {_plain(key): gpu for key, gpu in GPUS.items()} | {_plain(key): GPUS[to] for key, to in ALIASES.items()}
    for key in sorted(by_name, key=len, reverse=True):  # `H100 80GB HBM3` is an H100
        if re.fullmatch(rf"{key}(\d*gb)?", _plain(name)):
            return by_name[key]
    nearest = difflib.get_close_matches(_plain(name), by_name, 1, 0.0)[0]
    raise ValueError(f"GPU '{name}' is not known; the nearest is {by_name[nearest].name}. Known: {', '.join(GPUS)}")


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of equal nodes; ``network_gb_s`` is GB/s one way between nodes for each GPU."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    network_gb_s: float

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Read `NODESxGPUS:NAME`, such as `4x8:H100`. Raises ValueError."""
        match = CLUSTER.fullmatch(text.strip())
        if not match or int(match[1]) < 1 or int(match[2]) < 1:
            raise ValueError(f"cluster '{text}' should be NODESxGPUS:NAME, such as 4x8:H100 (4 nodes of 8 H100)")
        nodes, per_node, gpu = int(match[1]), int(match[2]), find_gpu(match[3])
        if nodes * per_node > LARGEST:
            raise ValueError(f"cluster '{text}' has {nodes * per_node:,} GPUs; at most {LARGEST:,} can be planned")
        return cls(nodes, per_node, gpu, gpu.network_gb_s)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def memory_bytes(self) -> float:
        """Return the memory of a device."""
        return self.gpu.memory_gib * 2**30

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}:{self.gpu.name}"

    @property
    def domain(self) -> int:
        """Devices that are joined by links rather than by the network."""
        return max(self.gpus_per_node, min(self.gpus, self.gpu.link_gpus if self.gpu.link_gpus > 8 else 0))


def _plain(name: str) -> str:
    return re.sub(r"nvidia|amd|instinct|geforce|hbm3e?|sxm\d?|[^a-z0-9]", "", name.lower())
