"""A model's configuration for megatron-core: what the weights are (MegatronConfig), how they are cut and compute."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from coalign.backends.megatron.attention import attention_factor
from coalign.backends.megatron.partition import ALWAYS, EXPERTS, LATENT, Sizes
from coalign.weights.families import MegatronConfig

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
# Kernels of Apex and Transformer Engine, or of torch.compile, that the layers without Transformer Engine do not have.
UNFUSED = dict.fromkeys(
    (
        "persist_layer_norm",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
    ),
    False,
)


def transformer_config(
    model: MegatronConfig, sizes: Sizes, *, dtype: torch.dtype = torch.float32, te: bool = False, **more: Any
) -> TransformerConfig:
    """``te``: with Transformer Engine's layers. ``more``: further fields, by megatron-core's names."""
    fields: dict[str, Any] = {name: getattr(model, name) for name in ALWAYS}
    if model.num_moe_experts:
        fields |= {name: getattr(model, name) for name in EXPERTS}
        # A list makes checkpoints keep each layer by itself; megatron-core's own word for "all of them" is 1.
        fields["moe_layer_freq"] = list(model.moe_layer_freq) if 0 in model.moe_layer_freq else 1
        # The auxiliary losses of pre-training are no part of what is trained here, unless asked for.
        fields |= {"moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.0}
        fields |= {"moe_router_dtype": "fp32", "moe_grouped_gemm": te}
        fields["expert_model_parallel_size"], fields["expert_tensor_parallel_size"] = sizes.expert, sizes.expert_tensor
    if model.multi_latent_attention:
        fields |= {name: getattr(model, name) for name in LATENT} | {"rope_type": "rope"}
        if (scaling := model.rope_scaling) is not None:  # of the scores
            fields |= {"rotary_scaling_factor": scaling.factor, "mscale_all_dim": scaling.mscale_all_dim or 0.0}
    fields |= {
        "activation_func": ACTIVATIONS[model.activation_func],
        "hidden_dropout": 0.0,  # megatron-core's default is 0.1
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if sizes.virtual > 1 else None,
        "context_parallel_size": sizes.context,
        "sequence_parallel": sizes.tensor > 1,
        "variable_seq_lengths": True,  # rows are as long as their sequences
        "moe_token_dispatcher_type": "alltoall",  # which that needs
        "batch_p2p_sync": False,
        # Stages that take turns: two of them are each other's next and previous, and would mix messages up.
        "overlap_p2p_comm": sizes.virtual > 1,
        "batch_p2p_comm": sizes.virtual == 1,
        "calculate_per_token_loss": True,  # gradients are sums: the loss has global denominators
        # Weights come from Hugging Face tensors; but only who draws some marks how they are cut.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _as_it_is),
        **({} if te else UNFUSED),
    }
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    config = kind(**fields | more)
    if (factor := attention_factor(model.rope_scaling)) != 1.0:
        # megatron-core looks for these, which are no fields; it makes 1 + mscale · ln(scaling factor) / 10 of them.
        config.yarn_rotary_scaling_factor, config.yarn_mscale = math.e, 10 * (factor - 1)
        config.yarn_mscale_all_dim = 0.0
    return config


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
