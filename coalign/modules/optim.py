"""Optimizers by name. Each lays its state out at once, so that a checkpoint of any age has the same entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coalign.config.schema import OptimizerConfig
from coalign.modules import bnb

Optimizer = torch.optim.Optimizer
MOMENTUM = 0.95  # of Muon
BETA2_DECAY = -0.8  # of Adafactor: the second moment forgets with 1 - step ** BETA2_DECAY
SMALLEST_RMS = 1e-3  # of Adafactor: a parameter moves at least as if its entries were this large


def build(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, layers: Sequence[nn.Module]
) -> Optimizer | SideBySide:
    """The optimizer ``config.name`` of those ``parameters`` that require a gradient.

    Muon takes the matrices inside of ``layers`` (a model's decoder layers), AdamW what is left: embeddings, head, norms
    and biases. Weight decay spares parameters of one dimension everywhere. Raises ValueError if nothing is trained.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient, so there is nothing to train")
    if config.name == "adafactor":
        return Adafactor(_groups(trained, config), lr=config.lr)
    if config.name == "adamw_8bit":
        return bnb.adamw(_groups(trained, config), config)
    if config.name == "muon":
        inside = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
        parts = (muon, [p for p in trained if p in inside]), (adamw, [p for p in trained if p not in inside])
        return SideBySide(*(make(own, config) for make, own in parts if own))
    return adamw(trained, config)


def adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (1711.05101)."""
    groups = _groups(parameters, config)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def muon(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Muon:
    """Muon with steps of AdamW's size (2502.16982), so that one learning rate serves both.

    A sharded matrix is orthogonalised as a whole: torch gathers what each product needs.
    """
    optimizer = torch.optim.Muon(
        parameters,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    for p in parameters:
        optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}
    return optimizer


class Adafactor(Optimizer):
    """Adafactor (1804.04235): of a matrix's second moments only the means of rows and columns are kept.

    The formula and constants of torch.optim.Adafactor, in operations that sharded tensors have. The step is relative:
    lr, or 1 / sqrt(step) where that is less, times the root mean square of the parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        for p in (p for group in self.param_groups for p in group["params"]):
            zeros = torch.zeros_like(p)
            factors = {"row_var": zeros[..., :1], "col_var": zeros[..., :1, :]} if p.ndim > 1 else {"variance": zeros}
            self.state[p] = {"step": torch.zeros(())} | {name: part.clone() for name, part in factors.items()}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Over sharded parameters a collective."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _adafactor(p, self.state[p], lr=group["lr"], weight_decay=group["weight_decay"])


def _adafactor(p: nn.Parameter, state: dict[str, Tensor], *, lr: float, weight_decay: float) -> None:
    state["step"] += 1
    step = float(state["step"])
    size = max(SMALLEST_RMS, _rms(p)) * min(lr, step**-0.5)
    p.mul_(1.0 - lr * weight_decay)
    tiny, fresh, square = torch.finfo(p.dtype).eps, step**BETA2_DECAY, p.grad.square()
    if p.ndim > 1:
        row = state["row_var"].lerp_(square.mean(-1, keepdim=True), fresh)
        column = state["col_var"].lerp_(square.mean(-2, keepdim=True), fresh)
        variance = row * column / row.mean(-2, keepdim=True).clamp(min=tiny)
    else:
        variance = state["variance"].lerp_(square, fresh)
    update = p.grad * variance.clamp(min=tiny**2).rsqrt()
    p.add_(update, alpha=-size / max(1.0, _rms(update)))


class SideBySide:
    """Several optimizers, each with its own parameters, as one."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        return {p: state for part in self.parts for p, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def clip(parameters: Iterable[nn.Parameter], limit: float | None) -> float:
    """The global L2 norm of the gradients, which are scaled down to ``limit`` where they exceed it. A collective."""
    alike = _by_mesh([p.grad for p in parameters if p.grad is not None])
    total = math.hypot(*(_number(nn.utils.get_total_norm(gradients)) for gradients in alike))
    if limit is not None and limit < total < math.inf:
        for gradients in alike:
            torch._foreach_mul_(gradients, limit / total)
    return total


def _groups(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    decayed, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [{"params": alike, "weight_decay": config.weight_decay} for alike in _by_mesh(decayed)]
    return groups + [{"params": alike, "weight_decay": 0.0} for alike in _by_mesh(rest)]


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those sharded over the same ranks together: an operation on a list of tensors takes no others."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


def _rms(tensor: Tensor) -> float:
    return _number(torch.linalg.vector_norm(tensor)) / tensor.numel() ** 0.5


def _number(value: Tensor) -> float:
    """A sharded tensor's norm is itself a sharded tensor."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
