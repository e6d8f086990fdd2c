"""Optimizers by name, gradient clipping, the learning-rate schedule, and moving averages of weights.

Every optimizer allocates its state when it is built, so that checkpoints have the same entries at any step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from coalign.config.schema import OptimizerConfig

Optimizer = torch.optim.Optimizer
MUON_MOMENTUM = 0.95
ADAFACTOR_BETA2_DECAY = -0.8  # beta2 of a step is 1 - step ** ADAFACTOR_BETA2_DECAY
ADAFACTOR_MIN_RMS = 1e-3  # a parameter moves at least as if its entries were this large


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizerConfig,
    *,
    layers: Sequence[nn.Module],
    exact: bool = False,
    scales: Mapping[nn.Parameter, float] | None = None,
) -> Optimizer | CombinedOptimizer:
    """The optimizer ``config.name`` of those ``parameters`` that require a gradient.

    Muon takes the matrices in ``layers`` (a model's decoder layers), AdamW the rest: embeddings, head, norms and
    biases. Parameters of one dimension have no weight decay. ``exact``: AdamW gives each entry of a parameter the same
    bits however the parameter is sharded. ``scales``: multiples of the learning rate, as `lr_scale` in the groups; not
    for Muon. Raises ValueError if nothing is trained, and what `check_adamw_8bit` raises.
    """
    scales = scales or {}
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient, so there is nothing to train")
    if config.name == "adafactor":
        return Adafactor(_groups(trained, config, scales), lr=config.lr)
    if config.name == "adamw_8bit":
        return _build_adamw_8bit(_groups(trained, config, scales), config)
    if config.name == "muon":
        if scales:
            raise ValueError("optimizer.name is muon, which has one learning rate: leave out vision.*_lr_scale")
        inside = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
        builders = (
            (_build_muon, [p for p in trained if p in inside]),
            (build_adamw, [p for p in trained if p not in inside]),
        )
        return CombinedOptimizer(*(make(members, config) for make, members in builders if members))
    return build_adamw(trained, config, exact=exact, scales=scales)


def build_adamw(
    parameters: Sequence[nn.Parameter],
    config: OptimizerConfig,
    *,
    exact: bool = False,
    scales: Mapping[nn.Parameter, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW (1711.05101)."""
    groups = _groups(parameters, config, scales or {})
    # torch's fused kernel for CPUs rounds the last entries of a tensor, which fill no vector, in another way.
    fused = not (exact and any(p.device.type == "cpu" for p in parameters))
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }
    return optimizer


def _build_muon(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Muon:
    """Muon with steps of AdamW's size (2502.16982), so that one learning rate suits both. torch gathers sharded
    matrices to orthogonalise them."""
    settings = {"weight_decay": config.weight_decay, "momentum": MUON_MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon(parameters, lr=config.lr, **settings)
    for p in parameters:
        optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}
    return optimizer


class Adafactor(Optimizer):
    """Adafactor (1804.04235): it keeps only the means of rows and columns of a matrix's second moments. The formula and
    constants are those of torch.optim.Adafactor, in operations that sharded tensors support. The step is min(lr, 1 /
    sqrt(step)) times the root mean square of the parameter."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        for p in (p for group in self.param_groups for p in group["params"]):
            zeros = torch.zeros_like(p)
            factors = {"row_var": zeros[..., :1], "col_var": zeros[..., :1, :]} if p.ndim > 1 else {"variance": zeros}
            self.state[p] = {"step": torch.zeros(())} | {name: factor.clone() for name, factor in factors.items()}

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (without a closure)
        """One update of every parameter that has a gradient. A collective over sharded parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _adafactor(p, p.grad, self.state[p], lr=group["lr"], weight_decay=group["weight_decay"])


def _adafactor(p: nn.Parameter, grad: Tensor, state: dict[str, Tensor], *, lr: float, weight_decay: float) -> None:
    state["step"] += 1
    step = float(state["step"])
    size = max(ADAFACTOR_MIN_RMS, _rms(p)) * min(lr, step**-0.5)
    p.mul_(1.0 - lr * weight_decay)
    tiny, fresh, square = torch.finfo(p.dtype).eps, step**ADAFACTOR_BETA2_DECAY, grad.square()
    if p.ndim > 1:
        row = state["row_var"].lerp_(square.mean(-1, keepdim=True), fresh)
        column = state["col_var"].lerp_(square.mean(-2, keepdim=True), fresh)
        variance = row * column / row.mean(-2, keepdim=True).clamp(min=tiny)
    else:
        variance = state["variance"].lerp_(square, fresh)
    update = grad * variance.clamp(min=tiny**2).rsqrt()
    p.add_(update, alpha=-size / max(1.0, _rms(update)))


class CombinedOptimizer:
    """Several optimizers, each with its own parameters, behind the interface of one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        states = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        return cast(dict[nn.Parameter, dict[str, Any]], states)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None, *, exact: bool = False) -> float:
    """Scale the gradients down to the L2 norm ``limit`` if they exceed it; returns the unclipped norm. A collective.
    ``exact``: the bits of the norm do not depend on how the gradients are sharded, since each is gathered."""
    alike = _by_mesh([p.grad for p in parameters if p.grad is not None])
    if exact:
        full = (gather(gradient) for gradients in alike for gradient in gradients)  # one after the other
        norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in full])
        total = math.hypot(*norms.tolist())
    else:
        total = math.hypot(*(float(gather(nn.utils.get_total_norm(gradients))) for gradients in alike))
    if limit is not None and limit < total < math.inf:
        for gradients in alike:
            torch._foreach_mul_(gradients, limit / total)  # pyright: ignore[reportPrivateImportUsage] (no public name)
    return total


def _groups(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig, scales: Mapping[nn.Parameter, float]
) -> list[dict[str, Any]]:
    if scales:
        alike: dict[float, list[nn.Parameter]] = {}
        for p in parameters:
            alike.setdefault(scales.get(p, 1.0), []).append(p)
        return [group | {"lr_scale": scale} for scale, scaled in alike.items() for group in _groups(scaled, config, {})]
    decayed, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [{"params": alike, "weight_decay": config.weight_decay} for alike in _by_mesh(decayed)]
    return groups + [{"params": alike, "weight_decay": 0.0} for alike in _by_mesh(rest)]


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the ranks that they are sharded over: operations on lists of tensors do not mix them."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def _rms(tensor: Tensor) -> float:
    return float(gather(torch.linalg.vector_norm(tensor))) / tensor.numel() ** 0.5


def gather(tensor: Tensor) -> Tensor:
    """The full tensor of one that may be sharded, as the norm of a sharded tensor is. A collective."""
    from torch.distributed.tensor import DTensor  # slow to import, and every recipe imports this file

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_adamw_8bit() -> None:
    """Raises ImportError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ImportError("optimizer.name: `adamw_8bit` needs bitsandbytes (pip install coalign[qlora])")


def _build_adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with the moments of tensors of 4096 and more entries in 8 bits, in blocks of 256 (2110.02861). Smaller
    tensors have float32 moments. It cannot read sharded parameters. Raises what `check_adamw_8bit` raises."""
    check_adamw_8bit()
    from bitsandbytes.optim.adamw import AdamW8bit

    optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, i, j)
    return optimizer


def compute_learning_rate(unit: int, config: OptimizerConfig, *, total: int) -> float:
    """The learning rate of the optimizer step that ends with ``unit`` (from 0) of the run's ``total``.

    A unit is an optimizer step, or a token trained on; ``warmup`` and ``decay`` count the same units. Linear warm-up:
    unit u of the first W gets lr * (u + 1) / (W + 1). Then the schedule falls to lr * min_lr_ratio at the last unit,
    and stays there if the run is longer.
    """
    if unit < config.warmup:
        return config.lr * (unit + 1) / (config.warmup + 1)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _schedule(unit, config, total))


def _schedule(unit: int, config: OptimizerConfig, total: int) -> float:
    """From 1 at the schedule's start to 0 at its end."""
    if config.schedule == "constant" or (config.schedule == "wsd" and not config.decay):
        return 1.0
    start = total - 1 - config.decay if config.schedule == "wsd" else config.warmup
    done = min(1.0, max(0.0, (unit - start) / max(1, total - 1 - start)))
    return 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done


class WeightAverage:
    """Exponential moving average of trained weights: decay * average + (1 - decay) * weights after each step. It starts
    from the first weights, in float32, because at decay 0.999 a step adds less than bfloat16 can hold; each average is
    sharded as its parameter. (AveragedModel of torch.optim.swa_utils copies frozen weights and the dtype.)"""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tensors: dict[str, Tensor] = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self.parameters.items():
            self.tensors[name].lerp_(p.float(), 1.0 - self.decay)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Within this context the model's weights are the average; afterwards the trained ones again, bit for bit."""
        trained = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.detach().copy_(self.tensors[name])
        try:
            yield
        finally:
            for name, p in self.parameters.items():
                p.detach().copy_(trained[name])
