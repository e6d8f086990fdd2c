"""GPT-2 (its linear layers are stored transposed) and StarCoder 1 (GPT-2 with one key and value for all heads)."""

from __future__ import annotations

from dataclasses import replace

from coalign.weights.families.family import Family
from coalign.weights.families.settings import (
    CLASSIC,
    GPT2_SIZES,
    Activation,
    ConvertedFields,
    FixedFields,
    RequiredValue,
    tied_embeddings,
)
from coalign.weights.families.sources import QueryKeyValueBlocks, SingleTensor

TENSORS = {
    "embedding.word_embeddings": SingleTensor("transformer.wte"),
    "embedding.position_embeddings": SingleTensor("transformer.wpe"),
    "decoder.final_layernorm": SingleTensor("transformer.ln_f"),
    "output_layer": SingleTensor("lm_head"),
}
NORMS = {"input_layernorm": SingleTensor("ln_1"), "pre_mlp_layernorm": SingleTensor("ln_2")}
COMMON = (
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
        *COMMON,
        Activation("activation_function", "gelu_new"),
        RequiredValue("scale_attn_by_inverse_layer_idx", False),
    ),
    tensors=TENSORS,
    layer=NORMS
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
        *COMMON,
        Activation("activation_function", "gelu_pytorch_tanh"),
        ConvertedFields(
            lambda hf: {"num_query_groups": 1} if hf.get("multi_query", True) else {},
            lambda config: {"multi_query": config.num_query_groups == 1},
        ),
    ),
    layer=NORMS
    | {
        # With one group all queries, the key, the value; with as many as heads, head by head: Megatron's order, both.
        "self_attention.linear_qkv": SingleTensor("attn.c_attn"),
        "self_attention.linear_proj": SingleTensor("attn.c_proj"),
        "mlp.linear_fc1": SingleTensor("mlp.c_fc"),
        "mlp.linear_fc2": SingleTensor("mlp.c_proj"),
    },
)
