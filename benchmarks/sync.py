"""How fast weights travel between processes of this host, and what memory it takes, for each transport.

    python -m benchmarks.sync [--readers 1] [--repeats 5] [transport …]

A trainer and some policies in Ray actors hold tensors of the shapes of Qwen2-0.5B in bfloat16; each sync moves all of
them, checksums included. Compared with the machine's memory copy, measured between the syncs: the best of 1 … all
threads, on as many bytes. Memory is the growth of the proportional set sizes of all processes, less what the policies
need for the weights themselves (one model each; one for all of them where they compute in shared memory).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coalign.backends.base import Module
from coalign.cluster.choice import start_cluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig, SyncConfig
from coalign.roles import Context
from coalign.weights.sync.sync import WeightSync

LAYERS, HIDDEN, FFN, VOCABULARY, HEADS, GROUPS, HEAD = 24, 896, 4864, 151936, 14, 2, 64
TRANSPORTS = {
    "shared_memory, adopted": ("shared_memory", "Adopting"),
    "shared_memory, copied": ("shared_memory", "Copying"),
    "broadcast": ("broadcast", "Copying"),
    "object_store": ("object_store", "Copying"),
    "disk": ("disk", "Copying"),
}


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        sizes = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
        for name, rows in sizes.items():
            found |= {f"model.layers.{i}.self_attn.{name}_proj.weight": (rows, HIDDEN)}
            found |= {f"model.layers.{i}.self_attn.{name}_proj.bias": (rows,)}
        found[f"model.layers.{i}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        for name, shape in {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}.items():
            found[f"model.layers.{i}.mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = (HIDDEN,)
    return found


class Training(Module):
    """Holds a model's tensors; every one of them changes."""

    spmd = True

    def setup(self) -> None:
        self.weights = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes().items()}

    def learn(self) -> None:
        for tensor in self.weights.values():
            tensor.view(-1)[:: 4096 // tensor.element_size()] += 0.01

    def export_weights(self, *, changing: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


class Copying(Module):
    """Computes with tensors of its own."""

    def setup(self) -> None:
        self.weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}

    def load_weights(self, weights: Any, *, version: int, adopt: bool = False) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)


class Adopting(Module):
    """Computes with the tensors that it is given."""

    adopts = True

    def setup(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Any, *, version: int, adopt: bool = False) -> None:
        self.weights = dict(weights)


def memory(module: Any, store: Any) -> int:
    """Proportional set size of this process, bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def copy_bandwidth(size: int) -> float:
    """GB/s at which this machine copies ``size`` bytes from one place to another, at best."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = 0.0
    for threads in range(1, len(os.sched_getaffinity(0)) + 1):
        ends = [i * size // threads for i in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(3):
                begun = time.perf_counter()
                list(pool.map(lambda a, b: np.copyto(target[a:b], source[a:b]), ends[:-1], ends[1:]))
                best = max(best, size / (time.perf_counter() - begun) / 1e9)
    return best


def measure(label: str, verify: str, readers: int, repeats: int) -> None:
    transport, module = TRANSPORTS[label]
    models = {
        "trainer": ModelConfig(module="benchmarks.sync:Training"),
        "policy": ModelConfig(module=f"benchmarks.sync:{module}", num_process=readers),
    }
    size = sum(2 * int(np.prod(shape)) for shape in shapes().values())
    config = RunConfig(algorithm="none", models=models, runtime=RuntimeConfig(cluster="ray"))
    with start_cluster(config) as cluster, tempfile.TemporaryDirectory() as directory:
        trainer, policy = (cluster.spawn(name, each, Context(model=name)) for name, each in models.items())
        total = lambda: sum(sum(model.run(memory).result()) for model in (trainer, policy))  # noqa: E731
        before = total()
        sync = WeightSync(trainer, policy, SyncConfig(transport=transport, directory=directory, verify=verify))
        first = sync(0)["sync/seconds"].value
        rates, copies, seconds = [], [], []
        for version in range(1, repeats + 1):
            trainer.learn().result()
            copies.append(copy_bandwidth(size))
            seconds.append(sync(version)["sync/seconds"].value)
            rates.append(size / seconds[-1] / 1e9)
        own = size if module == "Adopting" else 0  # the others had their tensors before
        extra = (total() - before - own) / size
        ratio = float(np.median([rate / copy for rate, copy in zip(rates, copies, strict=True)]))
        print(
            f"| {label} | {readers} | {first:.2f} | {np.median(seconds):.2f} | {np.median(rates):.2f} | "
            f"{np.median(copies):.2f} | {100 * ratio:.0f} % | {extra:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transports", nargs="*", default=list(TRANSPORTS), metavar="transport")
    parser.add_argument("--verify", choices=["all", "rotating"], default=SyncConfig().verify)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| transport | readers | first sync, s | sync, s | GB/s | memory copy, GB/s | of it | extra memory, models |")
    print("|---|---|---|---|---|---|---|---|")
    for label in options.transports:
        measure(label, options.verify, options.readers, options.repeats)


if __name__ == "__main__":
    main()
