"""torch.compile for decoder layers. They have one code, so one compilation serves all of them, for all lengths of rows;
attention stays as it is (coalign.modules.attention), and so does whatever surrounds a layer: sharding, recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def enable(layers: Sequence[nn.Module]) -> None:
    """Have ``layers`` compiled when they first compute."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check(device: torch.device, key: str) -> None:
    """Raises RuntimeError, with the compiler's name, where there is none that works. ``key`` is the setting that asks
    for it."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as problem:
            raise RuntimeError(f"{key}: {problem}") from problem
    elif not torch.utils._triton.has_triton():
        raise RuntimeError(f"{key} needs Triton for {device}, and it is not installed or does not know this device")
