"""Linear layers that multiply in 8-bit floats (2209.05433), by torchao. The only file that imports torchao.

Weights, gradients and activations between layers keep their dtype; names and checkpoints stay the same. Each product
scales its two factors by their largest entries: E4M3 forward, E5M2 for gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
MULTIPLE = 16  # of both sizes of a matrix, for the kernels
ROUTERS = ("gate", "router")  # rounding must not change which experts they choose


def check_device_type(device: torch.device, key: str) -> None:
    """Raises ValueError, naming the setting ``key``, unless ``device`` is a GPU."""
    if device.type != "cuda":
        raise ValueError(f"{key} needs a GPU that multiplies 8-bit floats, and this model computes on {device.type}")


def check_device(device: torch.device, key: str) -> None:
    """Raises ValueError, naming the setting ``key``, if ``device`` cannot multiply 8-bit floats."""
    check_device_type(device, key)
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        needed, there = (".".join(map(str, version)) for version in (CAPABILITY, found))
        raise ValueError(f"{key} needs a GPU of compute capability {needed} or more; that of {device} is {there}")


def check(device: torch.device, key: str) -> None:
    """Raises what `check_device` raises, and ImportError without torchao."""
    check_device(device, key)
    if find_spec("torchao") is None:
        raise ImportError(f"{key} needs torchao: pip install 'coalign[fp8]'")


def find_float8_layers(layer: nn.Module) -> list[str]:
    """Names of the linear layers in a decoder layer to convert: all whose sizes the kernels take, except routers."""
    return [
        name
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        and name.rpartition(".")[2] not in ROUTERS
    ]


def convert_layers(layers: Sequence[nn.Module], **options: Any) -> None:
    """Convert the linear layers of decoder layers. ``options``: further ones of torchao's Float8LinearConfig."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports] (an extra)
        Float8LinearConfig,
        convert_to_float8_training,
    )

    # Padding: the number of tokens is an inner dimension where the gradient of a weight is computed.
    config = Float8LinearConfig(pad_inner_dim=True, **options)
    for layer in layers:
        names = set(find_float8_layers(layer))
        convert_to_float8_training(layer, module_filter_fn=lambda _, name, names=names: name in names, config=config)
