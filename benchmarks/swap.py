"""How fast a model leaves its device and comes back, against a plain copy of as many bytes.

    python benchmarks/swap.py [--mib 1024] [--tensors 200] [--device cpu] [--repeat 5]

On CPU both ends are the host's memory, so what is measured is the code, and the pages that it takes and gives back; in
seconds of the processor, so that what else runs there counts less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from coalign.memory import Arena


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    numbers = given.mib * 2**20 // 4 // given.tensors
    tensors = [torch.full((numbers,), float(i), device=given.device) for i in range(given.tensors)]
    gib = given.tensors * numbers * 4 / 2**30

    arena = Arena(given.device)
    arena.settle("model", "weights", tensors)
    first = timed(lambda: arena.offload("model", ["weights"]), given.device)
    back = timed(lambda: arena.reload("model", ["weights"]), given.device)
    print(f"{gib:.2f} GiB in {given.tensors} tensors; at first leaves {gib / first:.1f}, comes {gib / back:.1f} GiB/s")
    rounds = [
        (
            timed(lambda: arena.offload("model", ["weights"]), given.device),
            timed(lambda: arena.reload("model", ["weights"]), given.device),
        )
        for _ in range(given.repeat)
    ]
    assert all(bool((tensor == float(i)).all()) for i, tensor in enumerate(tensors))
    leaves, comes = (gib / statistics.median(times) for times in zip(*rounds, strict=True))

    pinned = given.device != "cpu"
    host = torch.empty(given.tensors * numbers, pin_memory=pinned)
    device = torch.empty(given.tensors * numbers, device=given.device)
    host.zero_(), device.zero_()
    down = min(timed(lambda: host.copy_(device), given.device) for _ in range(given.repeat))
    up = min(timed(lambda: device.copy_(host), given.device) for _ in range(given.repeat))
    fresh = min(timed(lambda: torch.empty_like(device).copy_(host), given.device) for _ in range(given.repeat))
    print(f"leaves {leaves:.1f} GiB/s ({leaves * down / gib:.0%} of one copy, {gib / down:.1f})")
    print(f"comes  {comes:.1f} GiB/s ({comes * up / gib:.0%} of one copy, {gib / up:.1f}; to new {gib / fresh:.1f})")


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begun = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - begun


if __name__ == "__main__":
    main()
