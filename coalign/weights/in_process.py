"""Transports within one process: the target computes with the source's live tensors, or with a copy of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coalign.weights.transport import Model


def adopt(source: Model, target: Model, version: int) -> int:
    """Hand over the tensors; 0 bytes moved. Only where the two never compute at once: training works in place."""
    [weights] = source.run(live_weights).result()
    target.run(load_weights, weights, version, True).result()
    return 0


def copy(source: Model, target: Model, version: int) -> int:
    """Copy the tensors; the bytes moved. The target keeps this version while the source trains on."""
    [weights] = source.run(live_weights).result()
    target.run(load_weights, weights, version, False).result()
    return sum(tensor.nbytes for _, tensor in weights)


def live_weights(module: Any, store: Any) -> list[tuple[str, Tensor]]:
    """The module's own tensors under their Hugging Face names."""
    return list(module.export_weights())


def load_weights(module: Any, store: Any, weights: list[tuple[str, Tensor]], version: int, adopt: bool) -> None:
    """Compute with these tensors, or with their present values, from now on."""
    module.load_weights(weights, version=version, adopt=adopt)
