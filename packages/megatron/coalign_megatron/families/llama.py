"""Llama and the families with its layers: RMSNorm, rotary embeddings, a gated MLP, or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coalign_megatron.families.family import (
    DENSE_LAYER,
    FFN,
    GROUPS,
    HEAD,
    LENGTH,
    SIZES,
    TIED,
    UNTIED,
    Activation,
    ConcatenatedTensors,
    ConfigField,
    Family,
    FixedFields,
    Hf,
    QueryKeyValueBlocks,
    QueryKeyValueTensors,
    RequiredValues,
    Rope,
    Setting,
    SlidingWindow,
    StackedExperts,
    TensorRule,
    name_layer,
    name_others,
    norm_epsilon,
)
from coalign_megatron.layouts.megatron_model import EXPERT

TENSORS = name_others("model.embed_tokens", "model.norm")
PREFIX = "model.layers.{layer}."
LAYER = name_layer(
    "input_layernorm",
    QueryKeyValueTensors("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    ConcatenatedTensors(("mlp.gate_proj", "mlp.up_proj")),
    "mlp.down_proj",
)
COMMON = (*SIZES, LENGTH, FFN, Activation(), Rope())
RMS = norm_epsilon(1e-6)

# Llama 1, 2, 3 (Code Llama, Yi, DeepSeek-LLM …).
LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "YiForCausalLM"),
    model_types=("llama",),
    settings=(*COMMON, GROUPS, HEAD, RMS, UNTIED, RequiredValues(attention_bias=False, mlp_bias=False)),
    tensors=TENSORS,
    layer=LAYER,
    prefix=PREFIX,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    settings=(*COMMON, GROUPS, HEAD, RMS, UNTIED, SlidingWindow(4096)),
)


def _read_gelu(hf: Hf) -> dict[str, Any]:
    """The first Gemmas say `gelu`, and were trained with its tanh approximation all the same."""
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "gelu_pytorch_tanh"
    if activation not in ("gelu", "gelu_pytorch_tanh"):
        raise ValueError(f"config.json: 'hidden_activation' is {activation!r}; Gemma has 'gelu_pytorch_tanh'")
    return {"activation_func": "gelu_tanh"}


GEMMA = replace(
    LLAMA,
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    settings=(
        *SIZES,
        LENGTH,
        GROUPS,
        HEAD,
        FFN,
        _read_gelu,
        Rope(),
        RMS,
        TIED,
        FixedFields(layernorm_zero_centered_gamma=True),
        lambda hf: {"embedding_scale": hf["hidden_size"] ** 0.5},
        RequiredValues(attention_bias=False),
    ),
)

# ---- experts

ROUTER: dict[str, TensorRule | str] = {"mlp.router": "mlp.gate"}
EXPERTS: dict[str, TensorRule | str] = {
    EXPERT + "linear_fc1": ConcatenatedTensors(("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")),
    EXPERT + "linear_fc2": "mlp.experts.{expert}.down_proj",
}
# In memory transformers 5 has them in two tensors, [gate | up] and down.
STACKED: dict[str, TensorRule | str] = {
    EXPERT + "linear_fc1": StackedExperts("mlp.experts.gate_up_proj"),
    EXPERT + "linear_fc2": StackedExperts("mlp.experts.down_proj"),
}
TOP_K = ConfigField("moe_router_topk", "num_experts_per_tok")
EXPERT_FFN = ConfigField("moe_ffn_hidden_size", "moe_intermediate_size")
W = "block_sparse_moe.experts.{expert}."


def name_shared_expert(name: str) -> dict[str, TensorRule | str]:
    """Return the rules of the shared expert, an MLP called ``name`` that all tokens go through."""
    return {
        "mlp.shared_experts.linear_fc1": ConcatenatedTensors((f"mlp.{name}.gate_proj", f"mlp.{name}.up_proj")),
        "mlp.shared_experts.linear_fc2": f"mlp.{name}.down_proj",
    }


# Mistral with experts in every layer.
MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    settings=(
        *COMMON,
        GROUPS,
        HEAD,
        UNTIED,
        TOP_K,
        Rope(default_base=1000000.0),
        norm_epsilon(1e-5),
        SlidingWindow(),
        ConfigField("moe_ffn_hidden_size", "intermediate_size"),
        ConfigField("num_moe_experts", "num_local_experts", older=("num_experts",)),
        lambda hf: {"moe_layer_freq": (1,) * hf["num_hidden_layers"]},
    ),
    layer=LAYER
    | {
        "mlp.router": "block_sparse_moe.gate",
        EXPERT + "linear_fc1": ConcatenatedTensors((W + "w1", W + "w3")),
        EXPERT + "linear_fc2": W + "w2",
    },
    memory=ROUTER | STACKED,
)

# ---- Qwen 1.5, 2 and 2.5 (biases of queries, keys and values), Qwen 3 (norms of queries and keys)


def _read_sparse_layers(hf: Hf) -> dict[str, Any]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return {
        "moe_layer_freq": tuple(int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])),
        # Weights of the chosen experts that sum to 1 are a softmax over these alone.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
    }


QWEN_COMMON = (*COMMON, GROUPS, RMS, UNTIED, RequiredValues(use_sliding_window=False))
ROUTED = (_read_sparse_layers, TOP_K, EXPERT_FFN, HEAD)
NORMS: dict[str, TensorRule | str] = {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    settings=(*QWEN_COMMON, HEAD, FixedFields(add_qkv_bias=True)),
)
QWEN2_MOE = replace(
    LLAMA,
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    settings=(
        *QWEN_COMMON,
        *ROUTED,
        ConfigField("num_moe_experts", "num_experts"),
        ConfigField("add_qkv_bias", "qkv_bias", True),
        ConfigField("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
        FixedFields(moe_shared_expert_gate=True),
    ),
    layer=LAYER
    | ROUTER
    | EXPERTS
    | name_shared_expert("shared_expert")
    | {"mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight"},
    memory=STACKED,
)
QWEN3_FIXED = (FixedFields(qk_layernorm=True), RequiredValues(attention_bias=False))
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    settings=(*QWEN_COMMON, *QWEN3_FIXED, ConfigField("kv_channels", "head_dim", 128)),
    layer=LAYER | NORMS,
)
QWEN3_MOE = replace(
    LLAMA,
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    settings=(
        *QWEN_COMMON,
        *ROUTED,
        *QWEN3_FIXED,
        ConfigField("num_moe_experts", "num_experts", older=("num_local_experts",)),
    ),
    layer=LAYER | NORMS | ROUTER | EXPERTS,
    memory=STACKED,
)

# ---- Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose tower stays transformers' (coalign_megatron.backend.vision)


def _read_text(setting: Setting) -> Setting:
    """The setting, read from `text_config`, or from config.json itself, where older ones have everything."""
    return lambda hf: setting({**hf, **(hf.get("text_config") or {})})


def _read_ties(hf: Hf) -> dict[str, Any]:
    """Whether the head is tied: what the whole model says holds, not what its language model's section says."""
    return UNTIED({**(hf.get("text_config") or {}), **hf})


def _read_tower(hf: Hf) -> dict[str, Any]:
    """The parameters of the vision tower, which config.json alone does not say: those of transformers' class."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**hf))
    tower = model.get_submodule("model.visual")
    return {"tower": tuple((name, tuple(parameter.shape)) for name, parameter in tower.named_parameters())}


def _read_mrope(hf: Hf) -> dict[str, Any]:
    """Rotary embeddings of three axes: by which each pair of numbers turns, in sections, or in turns (Qwen3-VL)."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not (sections := rope.get("mrope_section")):
        raise ValueError("config.json: 'mrope_section' is missing")
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if rope.get("mrope_interleaved"):
        axes = [axis if pair < 3 * sections[axis := pair % 3] else 0 for pair in range(len(axes))]
    base = rope.get("rope_theta", hf.get("rope_theta", 1000000.0))
    return {"mrope_axes": tuple(axes), "rotary_base": base, "rope_scaling": None}


QWEN_VL = replace(
    QWEN2,
    name="qwen2_vl",
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    model_types=("qwen2_vl", "qwen2_5_vl"),
    settings=(
        *map(_read_text, (*SIZES, LENGTH, FFN, Activation(), GROUPS, RMS, HEAD, _read_mrope)),
        _read_ties,
        _read_text(RequiredValues(use_sliding_window=False)),
        FixedFields(add_qkv_bias=True),
        _read_tower,
    ),
    memory=name_others("model.language_model.embed_tokens", "model.language_model.norm"),
    memory_prefix="model.language_model.layers.{layer}.",
    tower=("visual.", "model.visual."),
)
QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    model_types=("qwen3_vl",),
    settings=(
        *map(_read_text, (*SIZES, LENGTH, FFN, Activation(), GROUPS, RMS, _read_mrope)),
        _read_ties,
        _read_text(RequiredValues(attention_bias=False)),
        _read_text(ConfigField("kv_channels", "head_dim", 128)),
        FixedFields(qk_layernorm=True),
        _read_tower,
        lambda hf: {"deepstack_layers": len(hf["vision_config"].get("deepstack_visual_indexes") or ())},
    ),
    tensors=name_others("model.language_model.embed_tokens", "model.language_model.norm"),
    prefix="model.language_model.layers.{layer}.",
    tower=("model.visual.", "model.visual."),
)

# The first Qwen, which only its own code loads. Beyond `seq_length` that code also rescales queries (log n) and the
# rotary base: a model here ends there.
QWEN = Family(
    name="qwen",
    architectures=("QWenLMHeadModel",),
    model_types=("qwen",),
    settings=(
        *SIZES,
        Rope("rotary_emb_base", "rotary_pct"),
        norm_epsilon(1e-6, "layer_norm_epsilon"),
        UNTIED,
        ConfigField("max_position_embeddings", "seq_length", 8192),
        lambda hf: {"ffn_hidden_size": hf["intermediate_size"] // 2},  # config.json counts gate and up together
        FixedFields(add_qkv_bias=True),
        RequiredValues(no_bias=True, scale_attn_weights=True),
    ),
    tensors=name_others("transformer.wte", "transformer.ln_f"),
    layer=name_layer(
        "ln_1",
        QueryKeyValueBlocks("attn.c_attn"),
        "attn.c_proj",
        "ln_2",
        ConcatenatedTensors(("mlp.w2", "mlp.w1")),
        "mlp.c_proj",
    ),
    prefix="transformer.h.{layer}.",
    base="transformer.",
)

# ---- Baichuan 1 and 2, which only their own code loads: 7B with rotary embeddings, 13B with ALiBi


def _read_positions(hf: Hf) -> dict[str, Any]:
    """7B has `max_position_embeddings`; 13B, with ALiBi, only `model_max_length`.

    Version 2 normalises the rows of its head. Nothing says so but a new setting and the new vocabulary.
    """
    rotary = hf.get("max_position_embeddings")
    return {
        "position_embedding_type": "alibi" if rotary is None else "rope",
        "max_position_embeddings": hf.get("model_max_length", 4096) if rotary is None else rotary,
        "normalised_head": "z_loss_weight" in hf or hf["vocab_size"] == 125696,
    }


BAICHUAN = replace(
    LLAMA,
    name="baichuan",
    architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    model_types=("baichuan",),
    settings=(*SIZES, FFN, Activation(), RMS, UNTIED, _read_positions),
    layer=LAYER | {"self_attention.linear_qkv": QueryKeyValueBlocks("self_attn.W_pack")},
)

# ---- GLM: ChatGLM 2 and 3, which only their own code loads, and GLM-4 9B

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
        lambda hf: {"num_query_groups": hf["multi_query_group_num"]} if hf.get("multi_query_attention") else {},
        norm_epsilon(1e-5, "layernorm_epsilon"),
        UNTIED,
        ConfigField("add_qkv_bias", "add_qkv_bias", False),
        FixedFields(rotary_percent=0.5, rotary_interleaved=True),
        RequiredValues(add_bias_linear=False, rmsnorm=True, post_layer_norm=True),
        RequiredValues(apply_residual_connection_post_layernorm=False),
        RequiredValues(rope_ratio=1),  # some versions of the code divide positions by it, others multiply the base
    ),
    tensors=name_others(
        "transformer.embedding.word_embeddings", "transformer.encoder.final_layernorm", "transformer.output_layer"
    ),
    layer=DENSE_LAYER | {"self_attention.linear_qkv": QueryKeyValueBlocks("self_attention.query_key_value")},
    prefix="transformer.encoder.layers.{layer}.",
    base="transformer.",
    computed=("rotary_pos_emb.inv_freq",),
)
GLM4 = replace(
    LLAMA,
    name="glm4",
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    settings=(
        *SIZES,
        LENGTH,
        FFN,
        GROUPS,
        Activation(),
        norm_epsilon(1.5625e-07),
        UNTIED,
        ConfigField("kv_channels", "head_dim", 128),
        Rope(percent="partial_rotary_factor", default_percent=0.5),
        ConfigField("add_qkv_bias", "attention_bias", True),
        FixedFields(rotary_interleaved=True),
    ),
    layer=LAYER | {"mlp.linear_fc1": "mlp.gate_up_proj"},
)

# ---- DeepSeek V2 and V3 (Moonlight too): latent attention, experts after the first layers

LATENT: dict[str, TensorRule | str] = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}
DEEPSEEK_LAYER = LAYER | LATENT | ROUTER | EXPERTS | name_shared_expert("shared_experts")


def _read_deepseek_layers(hf: Hf) -> dict[str, Any]:
    dense = hf.get("first_k_dense_replace") or 0
    return {
        "q_lora_rank": hf.get("q_lora_rank"),
        "moe_layer_freq": tuple(int(i >= dense) for i in range(hf["num_hidden_layers"])),
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
    }


def _read_groups(hf: Hf) -> dict[str, Any]:
    """Version 2's names of ways to choose experts: among all, or among those of some groups."""
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json: 'topk_method' is {method!r}; known are 'greedy' and 'group_limited_greedy'")
    if method == "greedy":
        return {}
    return {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}


DEEPSEEK_COMMON = (
    *COMMON,
    RMS,
    UNTIED,
    TOP_K,
    EXPERT_FFN,
    _read_deepseek_layers,
    FixedFields(multi_latent_attention=True, qk_layernorm=True),
    ConfigField("kv_lora_rank", "kv_lora_rank"),
    ConfigField("qk_head_dim", "qk_nope_head_dim"),
    ConfigField("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    ConfigField("v_head_dim", "v_head_dim"),
    ConfigField("num_moe_experts", "n_routed_experts"),
    ConfigField("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0),
    RequiredValues(attention_bias=False, moe_layer_freq=1),
)
DEEPSEEK_V2 = replace(
    LLAMA,
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    settings=(
        *DEEPSEEK_COMMON,
        _read_groups,
        FixedFields(moe_router_pre_softmax=True, moe_router_group_best=1),
        RequiredValues(scoring_func="softmax", norm_topk_prob=False),
    ),
    layer=DEEPSEEK_LAYER,
    memory=STACKED,
)
DEEPSEEK_V3 = replace(
    LLAMA,
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    settings=(
        *DEEPSEEK_COMMON,
        ConfigField("moe_router_num_groups", "n_group"),
        ConfigField("moe_router_group_topk", "topk_group"),
        FixedFields(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        RequiredValues(scoring_func="sigmoid", norm_topk_prob=True, topk_method="noaux_tc", rope_interleave=True),
    ),
    layer=DEEPSEEK_LAYER | {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    memory=STACKED,
)

QWEN_FAMILIES = (QWEN, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN_VL, QWEN3_VL)
LLAMA_FAMILIES = (LLAMA, MISTRAL, MIXTRAL, GEMMA, *QWEN_FAMILIES, BAICHUAN, CHATGLM, GLM4, DEEPSEEK_V2, DEEPSEEK_V3)
