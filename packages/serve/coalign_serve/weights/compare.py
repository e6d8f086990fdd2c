"""Comparison of two sets of named tensors, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from coalign.weights.model_files import read_header
from coalign.weights.sync.checksums import checksum, tensor_bytes


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Dtype, shape and checksum of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @staticmethod
    def of(tensor: Tensor) -> TensorDigest:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorDigest(dtype, tuple(tensor.shape), checksum(tensor_bytes(tensor)))


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One of the two sets. ``fetch`` returns a tensor by its name."""

    name: str
    digests: Mapping[str, TensorDigest]
    fetch: Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """``what`` differs in a tensor; for values also the largest |Δ| and how many of ``numel`` differ."""

    name: str
    what: str
    largest: float | None = None
    count: int = 0
    numel: int = 0


def find_differences(left: WeightSet, right: WeightSet, values: int = 100) -> Iterator[Difference]:
    """Yield all differences, by name; for the first ``values`` tensors whose values differ also by how much."""
    for name in sorted(left.digests.keys() | right.digests.keys()):
        first, second = left.digests.get(name), right.digests.get(name)
        if first is None or second is None:
            yield Difference(name, f"only in {left.name if second is None else right.name}")
        elif (first.shape, first.dtype) != (second.shape, second.dtype):
            yield Difference(name, f"{first.dtype}{list(first.shape)}, {second.dtype}{list(second.shape)}")
        elif first.checksum != second.checksum and values > 0:
            values -= 1
            yield _measure_difference(name, left.fetch(name), right.fetch(name))
        elif first.checksum != second.checksum:
            yield Difference(name, "values")


def _measure_difference(name: str, first: Tensor, second: Tensor) -> Difference:
    """Compare the values of two tensors of one shape and dtype; NaN and infinities count as an infinite |Δ|."""
    size = first.element_size()
    pairs = [t.contiguous().reshape(-1).view(torch.uint8).view(-1, size) for t in (first, second)]
    differ = (pairs[0] != pairs[1]).any(1)
    delta = (first.reshape(-1)[differ].double() - second.reshape(-1)[differ].double()).abs()
    return Difference(name, "values", float(delta.nan_to_num(float("inf")).max()), int(differ.sum()), first.numel())


def open_saved_weights(path: Path) -> WeightSet:
    """Open a Hugging Face directory, a checkpoint, or a run folder (its newest model). ValueError for anything else."""
    directory = next((d for d in (path, path / "hf", path / "model") if any(d.glob("*.safetensors"))), None)
    if directory is None:
        expected = "a Hugging Face directory (*.safetensors), a checkpoint of a run (hf/) or a run folder (model/)"
        raise ValueError(f"'{path}' holds no weights: expected {expected}")
    files: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        files |= dict.fromkeys(read_header(file), file)

    def fetch(name: str) -> Tensor:
        with safe_open(files[name], "pt") as tensors:
            return tensors.get_tensor(name)

    return WeightSet(str(path), {name: TensorDigest.of(fetch(name)) for name in files}, fetch)
