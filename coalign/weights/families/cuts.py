"""How tensor parallelism cuts a full Megatron parameter."""

from __future__ import annotations

from typing import Protocol

from coalign.weights.families.model import TensorParallelCut
from coalign.weights.shards import Box, Shape


class Cuttable(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def kind(self) -> TensorParallelCut: ...


def cut_of(parameter: Cuttable, index: int, count: int) -> tuple[Shape, list[tuple[Box, Box]]]:
    """The shape of what rank ``index`` of ``count`` holds, and which boxes of the full tensor lie where in it.

    ValueError if it does not divide.
    """
    shape, kind = parameter.shape, parameter.kind
    full: Box = tuple((0, size) for size in shape)
    if kind == "replicated":
        return shape, [(full, full)]
    dim, halves = (1 if kind == "row" else 0), (2 if kind == "gated" else 1)
    if shape[dim] % (halves * count):
        raise ValueError(
            f"'{parameter.name}' {list(shape)}: {shape[dim] // halves} rows or columns do not divide by {count} ranks"
        )
    half, own = shape[dim] // halves, shape[dim] // halves // count
    boxes = []
    for i in range(halves):
        there, here = list(full), list(full)
        there[dim] = (i * half + index * own, i * half + (index + 1) * own)
        here[dim] = (i * own, (i + 1) * own)
        boxes.append((tuple(there), tuple(here)))
    return (*shape[:dim], halves * own, *shape[dim + 1 :]), boxes
