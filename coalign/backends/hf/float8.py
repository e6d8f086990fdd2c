"""Linear layers that multiply in 8-bit floats (2209.05433), by torchao: the only file that imports it.

Weights, gradients and what goes between layers keep their dtype, and so do names and checkpoints. Each product scales
its two factors by their largest entries: E4M3 forward, E5M2 for gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
MULTIPLE = 16  # of both sizes of a matrix, for the kernels
ROUTERS = ("gate", "router")  # what they choose is not to be a matter of rounding


def check_device_type(device: torch.device, key: str) -> None:
    """Raises ValueError for a ``device`` of a kind that cannot multiply so. ``key``: the setting."""
    if device.type != "cuda":
        raise ValueError(f"{key} needs a GPU that multiplies 8-bit floats, and this model computes on {device.type}")


def check_device(device: torch.device, key: str) -> None:
    """Raises ValueError where ``device`` cannot multiply so."""
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
    """The linear layers within a decoder layer that compute so: all whose sizes the kernels take, but routers."""
    return [
        name
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        and name.rpartition(".")[2] not in ROUTERS
    ]


def convert_layers(layers: Sequence[nn.Module], **options: Any) -> None:
    """Have the linear layers of decoder layers compute so. ``options``: further ones of torchao's
    Float8LinearConfig."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The number of tokens is a side of the product that makes the gradient of a weight.
    config = Float8LinearConfig(pad_inner_dim=True, **options)
    for layer in layers:
        names = set(find_float8_layers(layer))
        convert_to_float8_training(layer, module_filter_fn=lambda _, name, names=names: name in names, config=config)
