"""The decode step of the native engine as graphs of its device (CUDA graphs, and what torch.accelerator has of them).

A step launches some fifty kernels a layer, and a GPU computes them faster than the host launches them. A graph launches
all of them at once. It repeats them with the same shapes on the same memory, so there is one for each number of rows
and columns, both rounded up, and all of them go when the cache or the weights move.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from coalign.backends.engines.native.cached_attention import ROWS
from coalign.devices import DeviceGraph, capture_graph

log = logging.getLogger(__name__)
WARM = 2  # steps before one is captured: many shapes of a short call never come back
COLUMNS = 256  # a graph attends to a multiple of so many columns
Compute = Callable[[int, int, Tensor], tuple[Tensor, ...]]


def _round_rows(count: int) -> int:
    """Return the rows of the graph for ``count`` sequences: 8, 16, 24, 32, 48, 64, 96, …, at most half of them idle."""
    units = -(-count // ROWS)
    power = 1 << (units - 1).bit_length()
    return ROWS * (power * 3 // 4 if power > 2 and units <= power * 3 // 4 else power)


class DecodeGraphs:
    """Captures and replays the decode step of one session. ``compute(rows, columns, live)`` is the step of the slots
    0..rows-1, each with fewer than ``columns`` tokens; those that are not ``live`` (bool[rows]) fill up the rows.
    ``name`` is the model's in a warning."""

    def __init__(self, compute: Compute, device: torch.device, name: str) -> None:
        self._compute, self._device, self._name = compute, device, name
        self._live = torch.zeros((), dtype=torch.int64, device=device)  # the number of live rows, for the graphs
        self._count = 0  # the same number, known to the host
        self._graphs: dict[tuple[int, int], tuple[DeviceGraph, tuple[Tensor, ...]]] = {}
        self._steps: Counter[tuple[int, int]] = Counter()
        self._memory_addresses: list[int] = []
        self._is_refused = False

    def run(
        self, count: int, columns: int, limits: tuple[int, int], memory: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Return what a step of the first ``count`` slots computes, for more rows than that, until the next step.
        ``limits``: the most rows and columns. ``memory``: all tensors that the step reads or writes. None where a step
        is not captured (yet): the caller then computes it itself."""
        addresses = [tensor.data_ptr() for tensor in memory]
        if addresses != self._memory_addresses:
            self.clear()
            self._memory_addresses = addresses
        shape = min(_round_rows(count), limits[0]), min(-(-columns // COLUMNS) * COLUMNS, limits[1])
        self._steps[shape] += 1
        if self._is_refused or self._steps[shape] <= WARM:
            return None
        if count != self._count:
            self._live.fill_(count)
            self._count = count
        if shape not in self._graphs:
            outputs = self._step(*shape)  # kernel by kernel: what loads with the first use cannot load in a capture
            self._capture(shape)
            return outputs
        graph, outputs = self._graphs[shape]
        graph.replay()
        return outputs

    def clear(self) -> None:
        """Free the graphs, and the memory that they have for themselves."""
        self._graphs.clear()

    def _step(self, rows: int, columns: int) -> tuple[Tensor, ...]:
        return self._compute(rows, columns, torch.arange(rows, device=self._device) < self._live)

    def _capture(self, shape: tuple[int, int]) -> None:
        pool = next((graph.pool() for graph, _ in self._graphs.values()), None)
        try:
            self._graphs[shape] = capture_graph(partial(self._step, *shape), self._device, pool)
        except RuntimeError as problem:  # a router that reads which experts it chose; no memory
            self._is_refused = True
            self.clear()
            text = str(problem).partition("\n")[0]
            log.warning("native engine: decoding of %s is launched kernel by kernel: %s", self._name, text)
