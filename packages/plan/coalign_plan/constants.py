"""The few constants of the physics, each with its meaning and source.

A share is of what the data sheet says. Sixteen of the defaults are fitted to the public tables of
benchmarks/plan_validation.py, near the values that are usual (PRIORS there). The others are round figures: NCCL's
latency, PCIe 4 under load, torch's AdamW on a host. `coalign plan --measure` keeps a machine's own in a file, which
replaces them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from coalign_plan.gpus import Gpu


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say about devices and software; seconds unless a comment says otherwise."""

    matmul: float = 0.9  # share of Gpu.matmul_share that large products inside a model reach
    narrow_matmul: float = 0.82  # the same for training in fp8: scaling and casting take their part
    attention: float = 0.54  # share of the bf16 peak that fused attention reaches, forward
    memory: float = 0.78  # share of the memory's bandwidth
    traffic: float = 2.3  # numbers moved around matrix products, over those that these read and write
    link: float = 0.75  # share of the links in a node that a collective reaches
    network: float = 0.67  # share of the network between nodes that a collective reaches
    overlap: float = 0.52  # share of FSDP's and DDP's collectives that computation can hide
    tile: float = 120  # rows or columns of a matrix product at which it runs at half its rate
    expert_launches: float = 3.2  # kernels of a layer with routed experts over those of one without
    collective_latency: float = 12e-6  # a small collective in a node; between nodes it takes three times as long
    layer: float = 4.6e-05  # a layer's kernels in one decode step with captured graphs, whatever the batch
    eager_layer: float = 0.00079  # launching a layer's kernels one by one from Python
    sequence: float = 1.1e-05  # scheduling, sampling and answering one sequence in one decode step
    decode_step: float = 0.0025  # the sampler's work on the host in one decode step, whatever the batch
    sync_tensor: float = 0.00062  # a tensor that a sync sends as a message of its own
    sync_fixed: float = 0.3  # a weight sync, whatever the weights: pausing, handshakes, caches
    host_gb_s: float = 20.0  # GB/s of one device to and from host memory
    host_adam_gb_s: float = 10.0  # GB/s of parameters and states that a device's share of host cores steps
    step: float = 1.0  # the driver's work in a step: data, advantages, logging
    sample: float = 0.0017  # the driver's work on a sample: texts, rewards, collation


@dataclass(frozen=True)
class MeasuredMachine:
    """Rates of one machine, found by ``coalign plan --measure``: its device and constants."""

    gpu: Gpu
    constants: Constants
    measured: dict[str, float]  # the probes' own figures, for people

    def save(self, path: Path) -> None:
        """Write the file; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_machine(path: Path) -> MeasuredMachine:
    """Read a file that MeasuredMachine.save wrote. Raises ValueError that names the file and what is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(Constants)}
        if unknown := set(content["constants"]) - names:
            raise ValueError(f"unknown constants {sorted(unknown)}")
        return MeasuredMachine(Gpu(**content["gpu"]), Constants(**content["constants"]), content["measured"])
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path} is not a file of measured constants ({error}); measure again with `coalign plan --measure`"
        raise ValueError(message) from None
