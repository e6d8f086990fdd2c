"""Creates megatron-core's configuration of a model from its architecture, its partition and its dtype."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from coalign.backends.megatron.attention import compute_attention_factor
from coalign.backends.megatron.partition import ALWAYS, EXPERTS, LATENT, ParallelSizes
from coalign.weights.families import MegatronConfig

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
# Fused kernels that layers without Transformer Engine do not have.
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


def create_transformer_config(
    model: MegatronConfig, sizes: ParallelSizes, *, dtype: torch.dtype = torch.float32, te: bool = False, **more: Any
) -> TransformerConfig:
    """Create the configuration.

    te: the layers are Transformer Engine's. more: further fields, by megatron-core's names.
    """
    fields: dict[str, Any] = {name: getattr(model, name) for name in ALWAYS}
    if model.num_moe_experts:
        fields |= {name: getattr(model, name) for name in EXPERTS}
        # A list makes checkpoints store each layer by itself; 1 means that all layers have experts.
        fields["moe_layer_freq"] = list(model.moe_layer_freq) if 0 in model.moe_layer_freq else 1
        # No auxiliary loss of pre-training, unless the user sets one.
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
        "moe_token_dispatcher_type": "alltoall",  # needed for variable lengths
        "batch_p2p_sync": False,
        # With virtual stages, two ranks are each other's next and previous: batched messages would be mixed up.
        "overlap_p2p_comm": sizes.virtual > 1,
        "batch_p2p_comm": sizes.virtual == 1,
        "calculate_per_token_loss": True,  # gradients are sums: the loss has global denominators
        # Weights come from Hugging Face tensors, but only initialised parameters get their partition attributes.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _initialise_nothing),
    }
    if not te:
        fields |= UNFUSED
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    config = kind(**fields | more)
    if (factor := compute_attention_factor(model.rope_scaling)) != 1.0:
        # megatron-core reads these attributes, which are no fields, and computes 1 + mscale · ln(scaling factor) / 10.
        vars(config).update(yarn_rotary_scaling_factor=math.e, yarn_mscale=10 * (factor - 1), yarn_mscale_all_dim=0.0)
    return config


def _initialise_nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
