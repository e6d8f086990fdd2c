"""Qwen 1.5, 2 and 2.5 (Llama with biases of queries, keys and values), Qwen 3 (with norms of queries and keys).

Both with experts or without. The first Qwen, which only its own code loads, is at the end.
"""

from __future__ import annotations

from dataclasses import replace

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, LLAMA, MLP
from coalign.weights.families.settings import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    GROUPS,
    HEAD,
    NORMALISED,
    QWEN_LAYERS,
    ROUTER,
    SIZES,
    STACKED,
    TOP_K,
    Activation,
    ConfigField,
    ConvertedFields,
    FixedFields,
    RequiredValue,
    Rope,
    norm_epsilon,
    shared,
    tied_embeddings,
)
from coalign.weights.families.sources import ConcatenatedTensors, QueryKeyValueBlocks, SingleTensor

COMMON = (
    *SIZES,
    GROUPS,
    FFN,
    Activation(),
    Rope(),
    norm_epsilon("rms_norm_eps", 1e-6),
    tied_embeddings(False),
    RequiredValue("use_sliding_window", False),
)
ROUTED = (QWEN_LAYERS, TOP_K, EXPERT_FFN, NORMALISED)
NORMS = {
    "self_attention.q_layernorm": SingleTensor("self_attn.q_norm"),
    "self_attention.k_layernorm": SingleTensor("self_attn.k_norm"),
}

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    settings=(*COMMON, HEAD, FixedFields(add_qkv_bias=True)),
)

QWEN2_MOE = replace(
    LLAMA,
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    settings=(
        *COMMON,
        *ROUTED,
        HEAD,
        ConfigField("num_moe_experts", "num_experts"),
        ConfigField("add_qkv_bias", "qkv_bias", True),
        ConfigField("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
        FixedFields(moe_shared_expert_gate=True),
    ),
    layer=ATTENTION
    | MLP
    | ROUTER
    | EXPERTS
    | shared("shared_expert")
    | {"mlp.shared_experts.gate_weight": SingleTensor("mlp.shared_expert_gate.weight")},
    memory=STACKED,
)

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    settings=(
        *COMMON,
        ConfigField("kv_channels", "head_dim", 128),
        FixedFields(qk_layernorm=True),
        RequiredValue("attention_bias", False),
    ),
    layer=ATTENTION | NORMS | MLP,
)

QWEN3_MOE = replace(
    LLAMA,
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    settings=(
        *COMMON,
        *ROUTED,
        HEAD,
        ConfigField("num_moe_experts", "num_experts", older=("num_local_experts",)),
        FixedFields(qk_layernorm=True),
        RequiredValue("attention_bias", False),
    ),
    layer=ATTENTION | NORMS | MLP | ROUTER | EXPERTS,
    memory=STACKED,
)

# Beyond `seq_length` its own code also rescales queries (log n) and the rotary base: a model here ends there.
QWEN = Family(
    name="qwen",
    architectures=("QWenLMHeadModel",),
    model_types=("qwen",),
    settings=(
        ConfigField("num_layers", "num_hidden_layers"),
        ConfigField("hidden_size", "hidden_size"),
        ConfigField("num_attention_heads", "num_attention_heads"),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("max_position_embeddings", "seq_length", 8192),
        ConvertedFields(  # of both halves
            lambda hf: {"ffn_hidden_size": hf["intermediate_size"] // 2},
            lambda config: {"intermediate_size": 2 * config.ffn_hidden_size},
        ),
        Rope("rotary_emb_base", "rotary_pct"),
        norm_epsilon("layer_norm_epsilon", 1e-6),
        tied_embeddings(False),
        FixedFields(add_qkv_bias=True),
        RequiredValue("no_bias", True),
        RequiredValue("scale_attn_weights", True),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("transformer.wte"),
        "decoder.final_layernorm": SingleTensor("transformer.ln_f"),
        "output_layer": SingleTensor("lm_head"),
    },
    layer={
        "input_layernorm": SingleTensor("ln_1"),
        "self_attention.linear_qkv": QueryKeyValueBlocks("attn.c_attn"),
        "self_attention.linear_proj": SingleTensor("attn.c_proj"),
        "pre_mlp_layernorm": SingleTensor("ln_2"),
        "mlp.linear_fc1": ConcatenatedTensors(("mlp.w2", "mlp.w1")),
        "mlp.linear_fc2": SingleTensor("mlp.c_proj"),
    },
    prefix="transformer.h.{layer}.",
    base="transformer.",
)
