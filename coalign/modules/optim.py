"""AdamW with its learning-rate schedule as a pure function of the update's number."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from coalign.config.schema import OptimizerConfig


def learning_rate(update: int, config: OptimizerConfig, *, total: int) -> float:
    """Of optimizer step ``update`` (from 0) of ``total``: linear warm-up, then the schedule down to lr * min_lr_ratio.

    The first of ``warmup`` steps already moves, by lr / (warmup + 1); the last one reaches the floor.
    """
    if update < config.warmup:
        return config.lr * (update + 1) / (config.warmup + 1)
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (update - config.warmup) / max(1, total - 1 - config.warmup))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with its state laid out at once, so that a checkpoint of any age has the same entries.

    Weight decay spares parameters of one dimension (biases, norms).
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def clip(parameters: Iterable[nn.Parameter], limit: float | None) -> float:
    """The global L2 norm of the gradients, which are scaled down to ``limit`` where they exceed it. A collective."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Tensor = nn.utils.get_total_norm(gradients)
    # A sharded gradient's norm is itself a sharded tensor.
    total = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if limit is not None and limit < total < math.inf:
        torch._foreach_mul_(gradients, limit / total)
    return total
