"""The layers of a model, as megatron-core's specs: its own, with attention over packed rows."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from coalign.megatron.attention import PackedAttention
from coalign.weights.families import MegatronConfig


def block(
    model: MegatronConfig, config: TransformerConfig, *, te: bool, chunk: int | None = None
) -> TransformerBlockSubmodules:
    """The layers that this rank has, in a chunk of its pipeline stage."""
    found = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=model.normalization, vp_stage=chunk
    )
    for layer in found.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if not te:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            if model.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = Norm
    if not te:
        found.layer_norm = Norm
    return found


class Norm:
    """torch's norm. Where ranks have other tokens of a row each, megatron-core sums the gradients of what is marked."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
        made = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}[config.normalization](hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made
