"""Activation checkpointing (1604.06174) and torch.compile for decoder layers.

All decoder layers have the same code, so one compilation serves them all, for rows of any length. Attention
(coalign.backends.attention) and what surrounds a layer (sharding, recomputation) are not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
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
