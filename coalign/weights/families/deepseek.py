"""DeepSeek V2 and V3 (Moonlight too): latent attention, experts after the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, MLP, PREFIX, TENSORS
from coalign.weights.families.settings import (
    DENSE_FIRST,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    ROUTER,
    SIZES,
    STACKED,
    TOP_K,
    Activation,
    ConfigField,
    ConvertedFields,
    FixedFields,
    Hf,
    RequiredValue,
    Rope,
    norm_epsilon,
    shared,
    tied_embeddings,
)
from coalign.weights.families.sources import SingleTensor
from coalign.weights.layouts.megatron_config import MegatronConfig

LATENT = {
    "self_attention.linear_q_proj": SingleTensor("self_attn.q_proj"),
    "self_attention.linear_q_down_proj": SingleTensor("self_attn.q_a_proj"),
    "self_attention.q_layernorm": SingleTensor("self_attn.q_a_layernorm"),
    "self_attention.linear_q_up_proj": SingleTensor("self_attn.q_b_proj"),
    "self_attention.linear_kv_down_proj": SingleTensor("self_attn.kv_a_proj_with_mqa"),
    "self_attention.kv_layernorm": SingleTensor("self_attn.kv_a_layernorm"),
    "self_attention.linear_kv_up_proj": SingleTensor("self_attn.kv_b_proj"),
}
LAYER = ATTENTION | LATENT | MLP | ROUTER | EXPERTS | shared("shared_experts")


def _read_shared(hf: Hf) -> dict[str, Any]:
    return {"moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"]}


def _write_shared(config: MegatronConfig) -> dict[str, Any]:
    return {"n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.moe_ffn_hidden_size}


def _read_groups(hf: Hf) -> dict[str, Any]:
    """Version 2's names of ways to choose experts: among all, or among those of some groups."""
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json: 'topk_method' is {method!r}; known are 'greedy' and 'group_limited_greedy'")
    if method == "greedy":
        return {}
    return {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}


def _write_groups(config: MegatronConfig) -> dict[str, Any]:
    if config.moe_router_num_groups is None:
        return {"topk_method": "greedy"}
    return {
        "topk_method": "group_limited_greedy",
        "n_group": config.moe_router_num_groups,
        "topk_group": config.moe_router_group_topk,
    }


COMMON = (
    *SIZES,
    FFN,
    Activation(),
    Rope(),
    norm_epsilon("rms_norm_eps", 1e-6),
    tied_embeddings(False),
    FixedFields(multi_latent_attention=True, qk_layernorm=True),
    ConvertedFields(
        lambda hf: {"q_lora_rank": hf.get("q_lora_rank")}, lambda config: {"q_lora_rank": config.q_lora_rank}
    ),
    ConfigField("kv_lora_rank", "kv_lora_rank"),
    ConfigField("qk_head_dim", "qk_nope_head_dim"),
    ConfigField("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    ConfigField("v_head_dim", "v_head_dim"),
    ConfigField("num_moe_experts", "n_routed_experts"),
    TOP_K,
    EXPERT_FFN,
    DENSE_FIRST,
    ConvertedFields(_read_shared, _write_shared),
    ConfigField("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0),
    RequiredValue("attention_bias", False),
    RequiredValue("moe_layer_freq", 1),
)

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    settings=(
        *COMMON,
        ConvertedFields(_read_groups, _write_groups),
        FixedFields(moe_router_pre_softmax=True, moe_router_group_best=1),
        RequiredValue("scoring_func", "softmax"),
        RequiredValue("norm_topk_prob", False),
    ),
    tensors=TENSORS,
    layer=LAYER,
    prefix=PREFIX,
    memory=STACKED,
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    settings=(
        *COMMON,
        ConfigField("moe_router_num_groups", "n_group"),
        ConfigField("moe_router_group_topk", "topk_group"),
        FixedFields(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        RequiredValue("scoring_func", "sigmoid"),
        RequiredValue("norm_topk_prob", True),
        RequiredValue("topk_method", "noaux_tc"),
        RequiredValue("rope_interleave", True),
    ),
    layer=LAYER | {"mlp.router.expert_bias": SingleTensor("mlp.gate.e_score_correction_bias")},
)
