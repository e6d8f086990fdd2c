"""AdamW with its moments in 8 bits, from bitsandbytes (2110.02861)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from coalign.config.schema import OptimizerConfig


def check() -> None:
    """Raises ImportError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ImportError("optimizer.name: `adamw_8bit` needs bitsandbytes (pip install coalign[qlora])")


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Moments of tensors of 4096 and more entries in 8 bits, in blocks of 256; of smaller ones in float32.

    Parameters must be whole: it cannot read sharded ones. Raises what `check` raises.
    """
    check()
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, i, j)
    return optimizer
