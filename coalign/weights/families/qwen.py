"""Qwen 1.5, 2, 2.5 (Llama with biases of queries, keys and values), Qwen 3 (norms of queries and keys), with experts or
without; and the first Qwen, which only its own code loads."""

from __future__ import annotations

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, MLP, PREFIX, TENSORS
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
    ConvertedFields,
    Field,
    FixedFields,
    RequiredValue,
    Rope,
    epsilon,
    shared,
    tied,
)
from coalign.weights.families.sources import ConcatenatedTensors, QueryKeyValueBlocks, SingleTensor

COMMON = (
    *SIZES,
    GROUPS,
    FFN,
    Activation(),
    Rope(),
    epsilon("rms_norm_eps", 1e-6),
    tied(False),
    RequiredValue("use_sliding_window", False),
)
ROUTED = (QWEN_LAYERS, TOP_K, EXPERT_FFN, NORMALISED)
NORMS = {
    "self_attention.q_layernorm": SingleTensor("self_attn.q_norm"),
    "self_attention.k_layernorm": SingleTensor("self_attn.k_norm"),
}

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    settings=(*COMMON, HEAD, FixedFields(add_qkv_bias=True)),
    tensors=TENSORS,
    layer=ATTENTION | MLP,
    prefix=PREFIX,
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    settings=(
        *COMMON,
        *ROUTED,
        HEAD,
        Field("num_moe_experts", "num_experts"),
        Field("add_qkv_bias", "qkv_bias", True),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
        FixedFields(moe_shared_expert_gate=True),
    ),
    tensors=TENSORS,
    layer=ATTENTION
    | MLP
    | ROUTER
    | EXPERTS
    | shared("shared_expert")
    | {"mlp.shared_experts.gate_weight": SingleTensor("mlp.shared_expert_gate.weight")},
    prefix=PREFIX,
    memory=STACKED,
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    settings=(
        *COMMON,
        Field("kv_channels", "head_dim", 128),
        FixedFields(qk_layernorm=True),
        RequiredValue("attention_bias", False),
    ),
    tensors=TENSORS,
    layer=ATTENTION | NORMS | MLP,
    prefix=PREFIX,
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    settings=(
        *COMMON,
        *ROUTED,
        HEAD,
        Field("num_moe_experts", "num_experts", older=("num_local_experts",)),
        FixedFields(qk_layernorm=True),
        RequiredValue("attention_bias", False),
    ),
    tensors=TENSORS,
    layer=ATTENTION | NORMS | MLP | ROUTER | EXPERTS,
    prefix=PREFIX,
    memory=STACKED,
)

# Beyond `seq_length` its own code also rescales queries (log n) and the rotary base: a model here ends there.
QWEN = Family(
    name="qwen",
    architectures=("QWenLMHeadModel",),
    model_types=("qwen",),
    settings=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "seq_length", 8192),
        ConvertedFields(  # of both halves
            lambda hf: {"ffn_hidden_size": hf["intermediate_size"] // 2},
            lambda config: {"intermediate_size": 2 * config.ffn_hidden_size},
        ),
        Rope("rotary_emb_base", "rotary_pct"),
        epsilon("layer_norm_epsilon", 1e-6),
        tied(False),
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
