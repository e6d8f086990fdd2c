"""Layers between matrix products as one kernel each: RMSNorm (1910.07467) and the gate of a SwiGLU MLP (2002.05202).

torch computes them by six to ten operations, each of which reads and writes everything. `use_kernels` replaces the
forward of the layers of a model that compute just this. It finds them by what they compute, not by their names.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coalign_cpu import operations
from coalign_cpu.library import load_kernels

MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # the children of an MLP with a gate in transformers


def use_kernels(model: nn.Module) -> None:
    """Let every RMSNorm and every MLP with a SiLU gate of ``model`` compute by kernels, where there are any.

    Call it before the model is sharded. Its parameters may be on the meta device.
    """
    if load_kernels() is None:
        return
    for module in model.modules():
        if (epsilon := find_epsilon(module)) is not None:
            module.__class__ = derive_class(KernelRMSNorm, type(module))
            cast(KernelRMSNorm, module).kernel_epsilon = epsilon
        elif is_silu_mlp(module):
            module.__class__ = derive_class(KernelMLP, type(module))


class KernelRMSNorm(nn.Module):
    """The first base of a class of layers that `find_epsilon` knows."""

    weight: Tensor
    kernel_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not operations.has_layer_kernel(hidden_states, self.weight):
            return super().forward(hidden_states)
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        if torch.is_autocast_enabled("cpu"):  # what reads it are linear layers, which would round it
            dtype = torch.get_autocast_dtype("cpu")
        if not torch.is_grad_enabled():
            return operations.normalise(hidden_states, self.weight, self.kernel_epsilon, dtype)[0]
        return cast(Tensor, RMSNormKernel.apply(hidden_states, self.weight, self.kernel_epsilon, dtype))


class KernelMLP(nn.Module):
    """The first base of a class of layers that `is_silu_mlp` knows."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if operations.has_kernel(gate, up):
            gated = SiluGateKernel.apply(gate, up) if torch.is_grad_enabled() else operations.gate_silu(gate, up)
            return self.down_proj(gated)
        return self.down_proj(self.act_fn(gate) * up)


@cache
def derive_class(kernel: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of both with the name of ``layer``."""
    return type(layer.__name__, (kernel, layer), {"__module__": layer.__module__})


def find_epsilon(module: nn.Module) -> float | None:
    """Return ε of a layer that computes weight · x / √(mean(x²) + ε), None for any other."""
    parameters = dict(module.named_parameters(recurse=False))
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or list(module.children()):
        return None
    if not _takes_one(module):  # a gate, say, which is None by default
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, len(parameters["weight"]), generator=generator, device="cpu")
    rows *= torch.tensor([[1.0], [1e-2], [1e-3]], device="cpu")  # where the mean is small ε shows
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        probe = copy.deepcopy(module).to_empty(device="cpu").float()
        weight = probe.get_parameter("weight").uniform_(0.5, 1.5, generator=generator)
        try:
            found = probe(rows)
        except Exception:  # a layer that takes something else; it may fail by whatever it stumbles over
            return None
        for epsilon in (value for value in vars(module).values() if isinstance(value, float)):
            expected = weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
            if isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=0):
                return epsilon
    return None


def is_silu_mlp(module: nn.Module) -> bool:
    """Whether a layer computes down(silu(gate(x)) · up(x)) with its children of these names."""
    if set(dict(module.named_children())) != MLP or not _takes_one(module):
        return False
    probe = copy.copy(module)
    stand_ins = {"gate_proj": _Scale(2.0), "up_proj": _Scale(-3.0), "down_proj": _Scale(0.5)}
    probe._modules = {**module._modules, **stand_ins}
    x = torch.linspace(-4, 4, 33, device="cpu")
    with torch.no_grad():
        try:
            return torch.allclose(probe(x), 0.5 * F.silu(2 * x) * (-3 * x), rtol=1e-5)
        except Exception:  # see above
            return False


def _takes_one(module: nn.Module) -> bool:
    """Whether a layer's forward takes one argument and no other."""
    return len(inspect.signature(module.forward).parameters) == 1


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class RMSNormKernel(torch.autograd.Function):
    """weight [H] · x [..., H] / √(mean(x²) + ε) in ``dtype``; x / √… is first rounded to the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        out, scales = operations.normalise(x, weight, epsilon, dtype)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        of_x, of_weight = operations.normalise_back(x, weight, scales, grad.contiguous())
        return of_x, of_weight.to(weight.dtype), None, None


class SiluGateKernel(torch.autograd.Function):
    """silu(gate) · up, both [...]; silu(gate) is first rounded to the dtype of both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return operations.gate_silu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return operations.gate_silu_back(gate, up, grad)
