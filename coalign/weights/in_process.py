"""Transports within one process: the target computes with the source's live tensors, or with a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from coalign.weights.transport import Model


def adopt(source: Model, target: Model, version: int, changing: bool) -> int:
    """Hand over the tensors; 0 bytes moved. Only where the two never compute at once: training works in place."""
    [weights] = source.run(live_weights, changing).result()
    target.run(load_weights, weights, version, True).result()
    return 0


def copy(source: Model, target: Model, version: int, changing: bool) -> int:
    """Copy the tensors; the bytes moved. The target keeps this version while the source trains on."""
    [weights] = source.run(live_weights, changing).result()
    return target.run(load_weights, weights, version, False).result()[0]


def live_weights(module: Any, store: Any, changing: bool) -> Iterator[tuple[str, Tensor]]:
    """The module's own tensors under their Hugging Face names; a merged one is made when the target takes it."""
    return module.export_weights(changing=changing)


def load_weights(module: Any, store: Any, weights: Iterator[tuple[str, Tensor]], version: int, adopt: bool) -> int:
    """Compute with these tensors, or with their present values, from now on; their bytes."""
    sizes: list[int] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            sizes.append(tensor.nbytes)
            yield name, tensor

    module.load_weights(counted(), version=version, adopt=adopt)
    return sum(sizes)
