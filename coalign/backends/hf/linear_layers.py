"""Changes how decoder layers compute: recomputation (1604.06174), torch.compile, products by oneDNN or in 8 bits
(2209.05433).

All decoder layers have the same code, so one compilation serves them all, for rows of any length. Attention and what
surrounds a layer (sharding, recomputation) are not compiled. Torchao's linear layers multiply in 8-bit floats; weights,
gradients and activations between layers keep their dtype. Each product scales its two factors by their largest entries:
E4M3 forward, E5M2 for gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from coalign.backends.engines.native.kernels import multiply_by_onednn
from coalign.devices import get_compute_capability

if TYPE_CHECKING:
    from transformers import PreTrainedModel


aten = torch.ops.aten
# Matrix products and attention take most of the time; what lies between them takes most of the memory.
EXPENSIVE = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.mkldnn._linear_pointwise.default,
}


def recompute_layers(model: PreTrainedModel, how: str) -> None:
    """Have backward recompute the layers: ``full`` everything in them, ``selective`` all but EXPENSIVE operations."""
    keep = {} if how == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    model.gradient_checkpointing_enable({"use_reentrant": False, **keep})


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile ``layers``, when each first computes."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compile(device: torch.device, key: str) -> None:
    """Raises RuntimeError, naming the setting ``key``, where no compiler works for ``device``."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as problem:
            raise RuntimeError(f"{key}: {problem}") from problem
    elif not has_triton():
        raise RuntimeError(f"{key} needs Triton for {device}, and it is not installed or does not know this device")


class _OneDNNLinear(torch.autograd.Function):
    """rows [..., in] · weightᵀ [in, out] + bias [out], and its gradients, computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return multiply_by_onednn(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        flat = grad.reshape(-1, len(weight))
        rows_grad = multiply_by_onednn(grad, weight.t()) if ctx.needs_input_grad[0] else None
        weight_grad = multiply_by_onednn(flat.t(), rows.reshape(len(flat), -1).t()) if ctx.needs_input_grad[1] else None
        return rows_grad, weight_grad, flat.sum(0) if ctx.needs_input_grad[2] else None


ONEDNN_ELEMENTS = 2**16  # products with smaller weights gain nothing


def use_onednn(layers: Sequence[nn.Module]) -> None:
    """Have the larger float32 linear layers in decoder layers compute by _OneDNNLinear."""
    for module in (module for layer in layers for module in layer.modules() if type(module) is nn.Linear):
        if module.weight.dtype == torch.float32 and module.weight.numel() >= ONEDNN_ELEMENTS:
            setattr(module, "forward", partial(_compute_linear, module))  # noqa: B010 (an attribute of this layer alone)


def _compute_linear(module: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _OneDNNLinear.apply(rows, module.weight, module.bias))


FLOAT8_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
FLOAT8_MULTIPLE = 16  # the kernels take matrices whose two sizes are multiples of it
ROUTERS = ("gate", "router")  # rounding must not change which experts they choose


def check_float8_device_type(device: torch.device, key: str) -> None:
    """Raises ValueError, naming the setting ``key``, unless ``device`` is a GPU."""
    if device.type != "cuda":
        raise ValueError(f"{key} needs a GPU that multiplies 8-bit floats, and this model computes on {device.type}")


def check_float8_device(device: torch.device, key: str) -> None:
    """Raises ValueError, naming the setting ``key``, if ``device`` cannot multiply 8-bit floats."""
    check_float8_device_type(device, key)
    if (capability := get_compute_capability(device)) < FLOAT8_CAPABILITY:
        needed, there = (".".join(map(str, version)) for version in (FLOAT8_CAPABILITY, capability))
        raise ValueError(f"{key} needs a GPU of compute capability {needed} or more; that of {device} is {there}")


def check_float8(device: torch.device, key: str) -> None:
    """Raises what `check_device` raises, and ImportError without torchao."""
    check_float8_device(device, key)
    if find_spec("torchao") is None:
        raise ImportError(f"{key} needs torchao: pip install 'coalign[fp8]'")


def _find_float8_layers(layer: nn.Module) -> list[str]:
    """Names of the linear layers in a decoder layer to convert: all whose sizes the kernels take, except routers."""
    return [
        name
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and module.in_features % FLOAT8_MULTIPLE == module.out_features % FLOAT8_MULTIPLE == 0
        and name.rpartition(".")[2] not in ROUTERS
    ]


def convert_to_float8(layers: Sequence[nn.Module], **options: Any) -> None:
    """Convert the linear layers of decoder layers. ``options``: further ones of torchao's Float8LinearConfig."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports] (an extra)
        Float8LinearConfig,
        convert_to_float8_training,
    )

    # Padding: the number of tokens is an inner dimension where the gradient of a weight is computed.
    config = Float8LinearConfig(pad_inner_dim=True, **options)
    for layer in layers:
        names = set(_find_float8_layers(layer))
        convert_to_float8_training(layer, module_filter_fn=lambda _, name, names=names: name in names, config=config)
