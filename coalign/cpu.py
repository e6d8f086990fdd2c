"""Kernels for CPUs, where the companion coalign-cpu is installed; without it torch computes alone, which takes longer.

``operations`` says by `has_kernel` and its like for which tensors there is a kernel, and has the kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from coalign.companions import KERNELS, ask, list_entries


class _NoKernels:
    """Stands in for the kernels: there is none for any tensor."""

    @staticmethod
    def has_kernel(*tensors: Tensor) -> bool:
        return False

    has_layer_kernel = has_copy_kernel = has_kernel


_kernels = list_entries(KERNELS).get("operations")
operations: Any = _NoKernels if _kernels is None else _kernels.load()


def use_kernels(model: nn.Module) -> None:
    """Let layers of ``model`` that torch computes slowly on CPUs compute by kernels; call it before it is sharded."""
    ask(KERNELS, "layers", model)
