"""Activation checkpointing (1604.06174): of a decoder layer only its input is kept, and backward computes it again.

torch.compile for decoder layers. They have one code, so one compilation serves all of them, for all lengths of rows;
attention stays as it is (coalign.backends.attention), and so does whatever surrounds a layer: sharding, recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

aten = torch.ops.aten
# Matrix products and attention are most of the computation; what lies between them is most of the memory.
DEAR = {
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
    """Have backward compute the layers again: ``full`` all of them, ``selective`` what is not DEAR."""
    keep = {} if how == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    model.gradient_checkpointing_enable({"use_reentrant": False, **keep})


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Have ``layers`` compiled when they first compute."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compile(device: torch.device, key: str) -> None:
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
