"""Families from before Llama: LayerNorm, an MLP of two layers. GPT-2, StarCoder, GPT-NeoX, OPT, BLOOM.

GPT-2's linear layers are stored transposed; StarCoder 1 is GPT-2 with one key and value for all heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, PREFIX, TENSORS
from coalign.weights.families.settings import (
    CLASSIC,
    FFN,
    GPT2_SIZES,
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
    window,
)
from coalign.weights.families.sources import QueryKeyValueBlocks, QueryKeyValueTensors, SingleTensor
from coalign.weights.layouts.megatron_config import MegatronConfig

GPT2_TENSORS = {
    "embedding.word_embeddings": SingleTensor("transformer.wte"),
    "embedding.position_embeddings": SingleTensor("transformer.wpe"),
    "decoder.final_layernorm": SingleTensor("transformer.ln_f"),
    "output_layer": SingleTensor("lm_head"),
}
GPT2_NORMS = {"input_layernorm": SingleTensor("ln_1"), "pre_mlp_layernorm": SingleTensor("ln_2")}
GPT2_COMMON = (
    *GPT2_SIZES,
    tied_embeddings(True),
    CLASSIC,
    FixedFields(position_embedding_type="learned_absolute", add_bias_linear=True),
    RequiredValue("scale_attn_weights", True),
    RequiredValue("add_cross_attention", False),
)

GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    settings=(
        *GPT2_COMMON,
        Activation("activation_function", "gelu_new"),
        RequiredValue("scale_attn_by_inverse_layer_idx", False),
    ),
    tensors=GPT2_TENSORS,
    layer=GPT2_NORMS
    | {
        "self_attention.linear_qkv": QueryKeyValueBlocks("attn.c_attn", transposed=True),
        "self_attention.linear_proj": SingleTensor("attn.c_proj", transposed=True),
        "mlp.linear_fc1": SingleTensor("mlp.c_fc", transposed=True),
        "mlp.linear_fc2": SingleTensor("mlp.c_proj", transposed=True),
    },
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
        ConvertedFields(
            lambda hf: {"num_query_groups": 1} if hf.get("multi_query", True) else {},
            lambda config: {"multi_query": config.num_query_groups == 1},
        ),
    ),
    layer=GPT2_NORMS
    | {
        # With one group all queries, the key, the value; with as many as heads, head by head: Megatron's order, both.
        "self_attention.linear_qkv": SingleTensor("attn.c_attn"),
        "self_attention.linear_proj": SingleTensor("attn.c_proj"),
        "mlp.linear_fc1": SingleTensor("mlp.c_fc"),
        "mlp.linear_fc2": SingleTensor("mlp.c_proj"),
    },
)


# StarCoder 2: Llama's attention with LayerNorm, biases and an MLP of two layers.
STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    settings=(
        *SIZES,
        GROUPS,
        FFN,
        Activation("hidden_act", "gelu_pytorch_tanh"),
        Rope(),
        norm_epsilon("norm_epsilon", 1e-5),
        tied_embeddings(True),
        window(None),
        CLASSIC,
        ConfigField("add_bias_linear", "use_bias", True),
    ),
    tensors=TENSORS,
    layer=ATTENTION | {"mlp.linear_fc1": SingleTensor("mlp.c_fc"), "mlp.linear_fc2": SingleTensor("mlp.c_proj")},
    prefix=PREFIX,
)


# GPT-NeoX, Pythia: attention and MLP read the same residual, each with its norm; a part of each head is rotated.
GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    settings=(
        *SIZES,
        FFN,
        Activation("hidden_act", "gelu"),
        Rope("rotary_emb_base", "rotary_pct", default_percent=0.25),
        norm_epsilon("layer_norm_eps", 1e-5),
        tied_embeddings(False),
        CLASSIC,
        FixedFields(add_bias_linear=True),
        ConvertedFields(
            lambda hf: {"parallel_residual": "two_norms" if hf.get("use_parallel_residual", True) else "none"},
            lambda config: {"use_parallel_residual": config.parallel_residual == "two_norms"},
        ),
        RequiredValue("attention_bias", True),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("gpt_neox.embed_in"),
        "decoder.final_layernorm": SingleTensor("gpt_neox.final_layer_norm"),
        "output_layer": SingleTensor("embed_out"),
    },
    layer={
        "input_layernorm": SingleTensor("input_layernorm"),
        "self_attention.linear_qkv": SingleTensor("attention.query_key_value"),
        "self_attention.linear_proj": SingleTensor("attention.dense"),
        "pre_mlp_layernorm": SingleTensor("post_attention_layernorm"),
        "mlp.linear_fc1": SingleTensor("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": SingleTensor("mlp.dense_4h_to_h"),
    },
    prefix="gpt_neox.layers.{layer}.",
    memory={"output_layer": SingleTensor("lm_head")},
    base="gpt_neox.",
    computed=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


# OPT, and Galactica, which has no biases and norms without weights.
def _read_embedding_width(hf: Hf) -> dict[str, Any]:
    """Embeddings of another width than the model (350M) have a projection that Megatron does not."""
    width = hf.get("word_embed_proj_dim") or hf["hidden_size"]
    if width != hf["hidden_size"]:
        raise ValueError(f"config.json: 'word_embed_proj_dim' is {width}; Megatron needs the hidden size")
    return {}


def _width(config: MegatronConfig) -> dict[str, Any]:
    return {"word_embed_proj_dim": config.hidden_size}


OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    settings=(
        *SIZES,
        ConfigField("ffn_hidden_size", "ffn_dim"),
        Activation("activation_function", "relu"),
        tied_embeddings(True),
        CLASSIC,
        FixedFields(position_embedding_type="learned_absolute", layernorm_epsilon=1e-5),
        ConfigField("add_bias_linear", "enable_bias", True),
        ConfigField("layernorm_affine", "layer_norm_elementwise_affine", True),
        ConvertedFields(_read_embedding_width, _width),
        RequiredValue("do_layer_norm_before", True),
        RequiredValue("_remove_final_layer_norm", False),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("model.decoder.embed_tokens"),
        # The first two rows were for padding in fairseq; position 0 is row 2.
        "embedding.position_embeddings": SingleTensor("model.decoder.embed_positions", skip=2),
        "decoder.final_layernorm": SingleTensor("model.decoder.final_layer_norm"),
        "output_layer": SingleTensor("lm_head"),
    },
    layer={
        "input_layernorm": SingleTensor("self_attn_layer_norm"),
        "self_attention.linear_qkv": QueryKeyValueTensors("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": SingleTensor("self_attn.out_proj"),
        "pre_mlp_layernorm": SingleTensor("final_layer_norm"),
        "mlp.linear_fc1": SingleTensor("fc1"),
        "mlp.linear_fc2": SingleTensor("fc2"),
    },
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
        norm_epsilon("layer_norm_epsilon", 1e-5),
        tied_embeddings(True),
        CLASSIC,
        FixedFields(position_embedding_type="alibi", activation_func="gelu_tanh"),
        FixedFields(add_bias_linear=True, embedding_layernorm=True),
        RequiredValue("apply_residual_connection_post_layernorm", False),
    ),
    tensors={
        "embedding.word_embeddings": SingleTensor("transformer.word_embeddings"),
        "embedding.layernorm": SingleTensor("transformer.word_embeddings_layernorm"),
        "decoder.final_layernorm": SingleTensor("transformer.ln_f"),
        "output_layer": SingleTensor("lm_head"),
    },
    layer={
        "input_layernorm": SingleTensor("input_layernorm"),
        "self_attention.linear_qkv": SingleTensor("self_attention.query_key_value"),
        "self_attention.linear_proj": SingleTensor("self_attention.dense"),
        "pre_mlp_layernorm": SingleTensor("post_attention_layernorm"),
        "mlp.linear_fc1": SingleTensor("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": SingleTensor("mlp.dense_4h_to_h"),
    },
    prefix="transformer.h.{layer}.",
    base="transformer.",
)
