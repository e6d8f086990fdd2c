"""Activation checkpointing (1604.06174): of a decoder layer only its input is kept, and backward computes it again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
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


def enable(model: PreTrainedModel, how: str) -> None:
    """Have backward compute the layers again: ``full`` all of them, ``selective`` what is not DEAR."""
    keep = {} if how == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    model.gradient_checkpointing_enable({"use_reentrant": False, **keep})


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in DEAR else CheckpointPolicy.PREFER_RECOMPUTE
