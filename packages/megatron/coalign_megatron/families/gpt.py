"""Families from before Llama: LayerNorm, an MLP of two layers. GPT-2, StarCoder, GPT-NeoX, OPT, BLOOM, Falcon.

GPT-2's linear layers are stored transposed; StarCoder 1 is GPT-2 with one key and value for all heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coalign_megatron.families.family import (
    CLASSIC,
    DENSE_LAYER,
    FFN,
    GROUPS,
    LENGTH,
    MEGATRON,
    SIZES,
    TIED,
    UNTIED,
    Activation,
    ConfigField,
    Family,
    FixedFields,
    Hf,
    QueryKeyValueBlocks,
    QueryKeyValueTensors,
    RequiredValues,
    Rope,
    SingleTensor,
    SlidingWindow,
    name_layer,
    name_others,
    norm_epsilon,
)
from coalign_megatron.families.llama import LAYER, LLAMA

EPSILON = norm_epsilon(1e-5, "layer_norm_epsilon")
GPT2_COMMON = (
    ConfigField("num_layers", "n_layer"),
    ConfigField("hidden_size", "n_embd"),
    ConfigField("num_attention_heads", "n_head"),
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("max_position_embeddings", "n_positions"),
    ConfigField("ffn_hidden_size", "n_inner", MEGATRON),
    EPSILON,
    TIED,
    CLASSIC,
    FixedFields(position_embedding_type="learned_absolute", add_bias_linear=True),
    RequiredValues(scale_attn_weights=True, add_cross_attention=False),
)
GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    settings=(
        *GPT2_COMMON,
        Activation("activation_function", "gelu_new"),
        RequiredValues(scale_attn_by_inverse_layer_idx=False),
    ),
    tensors=name_others("transformer.wte", "transformer.ln_f") | {"embedding.position_embeddings": "transformer.wpe"},
    layer=name_layer(
        "ln_1",
        QueryKeyValueBlocks("attn.c_attn", transposed=True),
        SingleTensor("attn.c_proj", transposed=True),
        "ln_2",
        SingleTensor("mlp.c_fc", transposed=True),
        SingleTensor("mlp.c_proj", transposed=True),
    ),
    prefix="transformer.h.{layer}.",
    base="transformer.",
    computed=("attn.bias", "attn.masked_bias"),
)
STARCODER = replace(
    GPT2,
    name="starcoder",
    architectures=("GPTBigCodeForCausalLM",),
    model_types=("gpt_bigcode",),
    settings=(
        *GPT2_COMMON,
        Activation("activation_function", "gelu_pytorch_tanh"),
        lambda hf: {"num_query_groups": 1} if hf.get("multi_query", True) else {},
    ),
    # `c_attn`: with one group all queries, the key, the value; with as many as heads, head by head: Megatron's order.
    layer=name_layer("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
)

# StarCoder 2: Llama's attention with LayerNorm, biases and an MLP of two layers.
STARCODER2 = replace(
    LLAMA,
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    settings=(
        *SIZES,
        LENGTH,
        GROUPS,
        FFN,
        Rope(),
        norm_epsilon(1e-5, "norm_epsilon"),
        TIED,
        SlidingWindow(),
        CLASSIC,
        Activation("hidden_act", "gelu_pytorch_tanh"),
        ConfigField("add_bias_linear", "use_bias", True),
    ),
    layer=LAYER | {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"},
)

# GPT-NeoX, Pythia: attention and MLP read the same residual, each with its norm; a part of each head is rotated.
GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    settings=(
        *SIZES,
        LENGTH,
        FFN,
        Activation("hidden_act", "gelu"),
        norm_epsilon(1e-5, "layer_norm_eps"),
        UNTIED,
        CLASSIC,
        Rope("rotary_emb_base", "rotary_pct", default_percent=0.25),
        FixedFields(add_bias_linear=True),
        lambda hf: {"parallel_residual": "two_norms" if hf.get("use_parallel_residual", True) else "none"},
        RequiredValues(attention_bias=True),
    ),
    tensors=name_others("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
    layer=DENSE_LAYER
    | {
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
    },
    prefix="gpt_neox.layers.{layer}.",
    memory={"output_layer": "lm_head"},
    base="gpt_neox.",
    computed=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


def _check_embedding_width(hf: Hf) -> dict[str, Any]:
    """Embeddings of another width than the model (350M) have a projection that Megatron does not."""
    width = hf.get("word_embed_proj_dim") or hf["hidden_size"]
    if width != hf["hidden_size"]:
        raise ValueError(f"config.json: 'word_embed_proj_dim' is {width}; Megatron needs the hidden size")
    return {}


# OPT, and Galactica, which has no biases and norms without weights.
OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    settings=(
        *SIZES,
        LENGTH,
        Activation("activation_function", "relu"),
        TIED,
        CLASSIC,
        _check_embedding_width,
        ConfigField("ffn_hidden_size", "ffn_dim"),
        FixedFields(position_embedding_type="learned_absolute", layernorm_epsilon=1e-5),
        ConfigField("add_bias_linear", "enable_bias", True),
        ConfigField("layernorm_affine", "layer_norm_elementwise_affine", True),
        RequiredValues(do_layer_norm_before=True, _remove_final_layer_norm=False),
    ),
    # The first two rows of positions were for padding in fairseq; position 0 is row 2.
    tensors=name_others("model.decoder.embed_tokens", "model.decoder.final_layer_norm")
    | {"embedding.position_embeddings": SingleTensor("model.decoder.embed_positions", skip=2)},
    layer=name_layer(
        "self_attn_layer_norm",
        QueryKeyValueTensors("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out_proj",
        "final_layer_norm",
        "fc1",
        "fc2",
    ),
    prefix="model.decoder.layers.{layer}.",
)

# BLOOM: ALiBi, a norm of the embedding, heads packed as Megatron has them.
BLOOM = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    model_types=("bloom",),
    settings=(
        ConfigField("num_layers", "n_layer", older=("num_hidden_layers",)),
        ConfigField("hidden_size", "hidden_size", older=("n_embed",)),
        ConfigField("num_attention_heads", "n_head", older=("num_attention_heads",)),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("max_position_embeddings", "seq_length", 2048),
        EPSILON,
        TIED,
        CLASSIC,
        FixedFields(position_embedding_type="alibi", activation_func="gelu_tanh"),
        FixedFields(add_bias_linear=True, embedding_layernorm=True),
        RequiredValues(apply_residual_connection_post_layernorm=False),
    ),
    tensors=name_others("transformer.word_embeddings", "transformer.ln_f")
    | {"embedding.layernorm": "transformer.word_embeddings_layernorm"},
    layer=DENSE_LAYER,
    prefix="transformer.h.{layer}.",
    base="transformer.",
)

# ---- Falcon: 7B (one key and value, one norm), 40B (groups, two norms), RW (ALiBi, no parallel residual)


def _has_groups(hf: Hf) -> bool:
    return hf.get("new_decoder_architecture", hf.get("model_type") == "RefinedWeb")


def _has_two_norms(hf: Hf) -> bool:
    return _has_groups(hf) and hf.get("num_ln_in_parallel_attn") in (None, 2)


def _read_falcon(hf: Hf) -> dict[str, Any]:
    heads = hf.get("num_attention_heads") or hf["n_head"]
    parallel, alibi = hf.get("parallel_attn", True), bool(hf.get("alibi", False))
    if _has_groups(hf):
        if not parallel:
            raise ValueError("config.json: 'parallel_attn' is False; with 'new_decoder_architecture' it has to be True")
        groups = hf.get("num_kv_heads") or hf.get("n_head_kv") or heads
    else:
        groups = 1 if hf.get("multi_query", True) else heads
    norms = "two_norms" if _has_two_norms(hf) else "one_norm"
    return {
        "num_query_groups": groups,
        "parallel_residual": norms if parallel else "none",
        "position_embedding_type": "alibi" if alibi else "rope",
        "alibi_scaled": alibi,
    }


FALCON = replace(
    BLOOM,
    name="falcon",
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    model_types=("falcon", "RefinedWebModel", "RefinedWeb"),
    settings=(
        ConfigField("num_layers", "num_hidden_layers", older=("n_layer",)),
        ConfigField("hidden_size", "hidden_size"),
        ConfigField("num_attention_heads", "num_attention_heads", older=("n_head",)),
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("max_position_embeddings", "max_position_embeddings", 2048),
        ConfigField("ffn_hidden_size", "ffn_hidden_size", MEGATRON),
        ConfigField("add_bias_linear", "bias", False),
        Activation("activation", "gelu"),
        EPSILON,
        TIED,
        Rope(),
        CLASSIC,
        _read_falcon,
    ),
    when=lambda hf: not _has_two_norms(hf),
)
FALCON_40B = replace(
    FALCON,
    name="falcon_40b",
    layer={**FALCON.layer, "input_layernorm": "ln_attn", "pre_mlp_layernorm": "ln_mlp"},
    when=_has_two_norms,
)

GPT_FAMILIES = (GPT2, STARCODER, STARCODER2, GPT_NEOX, OPT, BLOOM, FALCON, FALCON_40B)
