"""GLM: ChatGLM 2 and 3, which only their own code loads, and GLM-4 9B."""

from __future__ import annotations

from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, PREFIX, TENSORS
from coalign.weights.families.settings import (
    FFN,
    GROUPS,
    SIZES,
    Activation,
    ConfigField,
    ConvertedFields,
    FixedFields,
    Hf,
    RequiredValue,
    Rope,
    norm_epsilon,
    tied_embeddings,
)
from coalign.weights.families.sources import QueryKeyValueBlocks, SingleTensor
from coalign.weights.layouts.megatron_config import MegatronConfig

HALF_INTERLEAVED = FixedFields(rotary_interleaved=True)


def _groups(hf: Hf) -> dict[str, Any]:
    return {"num_query_groups": hf["multi_query_group_num"]} if hf.get("multi_query_attention") else {}


def _groups_back(config: MegatronConfig) -> dict[str, Any]:
    return {"multi_query_attention": True, "multi_query_group_num": config.num_query_groups}


CHATGLM = Family(
    name="chatglm",
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    model_types=("chatglm",),
    settings=(
        ConfigField("num_layers", "num_layers"),
        ConfigField("hidden_size", "hidden_size"),
        ConfigField("ffn_hidden_size", "ffn_hidden_size"),
        ConfigField("num_attention_heads", "num_attention_heads"),
        ConfigField("kv_channels", "kv_channels"),
        ConfigField("vocab_size", "padded_vocab_size"),  # what the tensors have
        ConfigField("max_position_embeddings", "seq_length"),
        ConvertedFields(_groups, _groups_back),
        norm_epsilon("layernorm_epsilon", 1e-5),
        tied_embeddings(False),
        ConfigField("add_qkv_bias", "add_qkv_bias", False),
        FixedFields(rotary_percent=0.5),
        HALF_INTERLEAVED,
        RequiredValue("add_bias_linear", False),
        RequiredValue("rmsnorm", True),
        RequiredValue("post_layer_norm", True),
        RequiredValue("apply_residual_connection_post_layernorm", False),
        RequiredValue("rope_ratio", 1),  # some versions of the code divide positions by it, others multiply the base
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("transformer.embedding.word_embeddings"),
        "decoder.final_layernorm": SingleTensor("transformer.encoder.final_layernorm"),
        "output_layer": SingleTensor("transformer.output_layer"),
    },
    layer={
        "input_layernorm": SingleTensor("input_layernorm"),
        "self_attention.linear_qkv": QueryKeyValueBlocks("self_attention.query_key_value"),
        "self_attention.linear_proj": SingleTensor("self_attention.dense"),
        "pre_mlp_layernorm": SingleTensor("post_attention_layernorm"),
        "mlp.linear_fc1": SingleTensor("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": SingleTensor("mlp.dense_4h_to_h"),
    },
    prefix="transformer.encoder.layers.{layer}.",
    base="transformer.",
    computed=("rotary_pos_emb.inv_freq",),
)

GLM4 = Family(
    name="glm4",
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    settings=(
        *SIZES,
        GROUPS,
        ConfigField("kv_channels", "head_dim", 128),
        FFN,
        Activation(),
        Rope(percent="partial_rotary_factor", default_percent=0.5),
        norm_epsilon("rms_norm_eps", 1.5625e-07),
        tied_embeddings(False),
        ConfigField("add_qkv_bias", "attention_bias", True),
        HALF_INTERLEAVED,
    ),
    tensors=TENSORS,
    layer=ATTENTION
    | {"mlp.linear_fc1": SingleTensor("mlp.gate_up_proj"), "mlp.linear_fc2": SingleTensor("mlp.down_proj")},
    prefix=PREFIX,
)
